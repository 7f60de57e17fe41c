//! The batch script of a job.
//!
//! It runs on the first node: it starts an agent on each by srun, writes what it knows into the folder of the job
//! (`run.rs` reads it), and asks for another start where the agents do.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::quote::{bash_word, clock, directive, path_text, path_word, pattern};
use super::run::{AGENT_EXIT, END, RUN, START_MARK, TENSORBOARD_LOG, batch_log};
use crate::engine::token;
use crate::error::{Error, Result};
use crate::spec::{JobSpec, launcher_here};

/// How long agents wait for one another. All start at once, and only a new start of the job brings a lost one back.
const JOIN_TIMEOUT: u64 = 120;
/// How long srun waits for the other agents once one has ended: longer than agents wait for one another.
const SRUN_WAIT: u64 = JOIN_TIMEOUT + 30;
/// So many seconds before the end of its time a job is told, where its time is long enough; Slurm may be a minute early.
const NOTICE: u64 = 60;
const NOTICED_FROM: u64 = 600;
/// How long ranks have to save. Where Slurm leaves them less (`KillWait`), it kills them itself.
const GRACE: u64 = NOTICE - 10;

/// Blocks of a broadcast are small, so that a busy node answers to each before Slurm's own patience ends.
const BROADCAST_BLOCK: &str = "1m";
const BROADCAST_TIMEOUT: u64 = 60;

/// Where the copies of accel-launch and of the program are that `--broadcast` sends, within the folder of the job.
pub(super) const COPIED_LAUNCHER: &str = "accel-launch";
pub(super) const COPIED_PROGRAM: &str = "program";

/// The two files that every node runs.
#[derive(Clone, Debug)]
pub(super) struct AgentFiles {
    pub(super) launcher: PathBuf,
    pub(super) program: PathBuf,
}

impl AgentFiles {
    /// Those of this machine.
    ///
    /// # Errors
    /// When one is not there.
    pub(super) fn here(spec: &JobSpec) -> Result<Self> {
        Ok(Self {
            launcher: launcher_here()?,
            program: spec.program_file()?,
        })
    }
}

/// The script, for a job whose folder this is.
///
/// # Errors
/// When a value cannot stand in an option of Slurm's.
pub(super) fn render(spec: &JobSpec, folder: &Path, files: &AgentFiles) -> Result<String> {
    let mut script = "#!/bin/bash\n".to_owned();
    let mut given = spec.options.slurm.sbatch_arg.iter();
    if let Some(option) = given.find(|option| is_refused(option)) {
        return Err(Error::usage(format!(
            "--sbatch-arg {option}: a job is submitted as one, and at once; `accel-launch jobs wait {}` waits for its end",
            spec.name
        )));
    }
    for option in options(spec, folder)?
        .iter()
        .chain(&spec.options.slurm.sbatch_arg)
    {
        script.push_str(&directive(option)?);
    }
    // Writing to a string does not fail.
    let _ = write!(
        script,
        r#"
folder={folder}
restarts=${{SLURM_RESTART_COUNT:-0}}
put() {{ printf '%s\n' "$2" >"$folder/$1.new" && mv "$folder/$1.new" "$folder/$1"; }}
finish() {{ put {END} "{{\"code\":$1,\"ended\":$(date +%s),\"signalled\":$signalled,\"timed_out\":$timed_out}}"; exit "$1"; }}

signalled=false timed_out=false
trap 'signalled=true' TERM
rm -f "$folder"/{AGENT_EXIT}* "$folder/{END}" "$folder/{TENSORBOARD_LOG}"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "{START_MARK}$restarts of job $SLURM_JOB_ID, on ${{nodes//$'\n'/ }}"
put {RUN} "{{\"restarts\":$restarts,\"started\":$(date +%s),\"nodes\":[\"${{nodes//$'\n'/\",\"}}\"]}}"
"#,
        folder = path_word(folder)?,
    );
    if spec.max_restarts > 0 {
        let _ = write!(
            script,
            "# Slurm starts a job again that has lost a node; the last time it does not.\n\
             [ \"$restarts\" -lt {} ] || scontrol update JobId=\"$SLURM_JOB_ID\" Requeue=0\n",
            spec.max_restarts
        );
    }
    if spec.tensorboard {
        let _ = write!(
            script,
            "tensorboard --host \"$SLURMD_NODENAME\" --port 0 --logdir {} >\"$folder/{TENSORBOARD_LOG}\" 2>&1 &\n\
             tensorboard=$!\n\
             trap 'kill \"$tensorboard\" 2>/dev/null' EXIT\n",
            path_word(&spec.logdir)?
        );
    }
    script.push_str(&start(spec, folder, files)?);
    script.push_str(&wait(spec));
    Ok(script)
}

/// Whether sbatch would wait with that option, or submit several jobs, or none.
fn is_refused(option: &str) -> bool {
    let name = option.split('=').next().unwrap_or_default();
    ["--wait", "--array", "--test-only"].contains(&name)
        || ["-W", "-a"].iter().any(|short| option.starts_with(short))
}

/// Whether it is sbatch's own option for the folder of the job.
fn is_chdir(option: &str) -> bool {
    option.starts_with("--chdir=") || option.starts_with("-D")
}

/// The options of sbatch that follow from the vocabulary of all engines.
fn options(spec: &JobSpec, folder: &Path) -> Result<Vec<String>> {
    let slurm = &spec.options.slurm;
    let resources = &spec.resources;
    let mut options = Vec::new();
    let mut option = |name: &str, value: Option<String>| {
        options.extend(value.map(|value| format!("--{name}={value}")));
    };
    option("job-name", Some(spec.name.to_string()));
    option("nodes", Some(spec.nodes.to_string()));
    option("ntasks-per-node", Some("1".to_owned()));
    option("cpus-per-task", cpus(spec));
    let gpus = (resources.gpus > 0).then(|| resources.gpus.to_string());
    option("gpus-per-node", gpus);
    let memory = resources.memory;
    option(
        "mem",
        memory.map(|memory| format!("{}M", memory.mebibytes())),
    );
    let limit = spec.time_limit.map(|limit| limit.as_secs());
    option("time", limit.map(clock));
    let notice = limit.is_none_or(|limit| limit >= NOTICED_FROM);
    option("signal", notice.then(|| format!("TERM@{NOTICE}")));
    option("qos", spec.priority.clone());
    option("partition", slurm.partition.clone());
    option("account", slurm.account.clone());
    option("constraint", slurm.constraint.clone());
    let working_dir = spec
        .working_dir
        .as_deref()
        .map(crate::spec::absolute)
        .transpose()?;
    option("chdir", working_dir.as_deref().map(path_text).transpose()?);
    option("output", Some(pattern(&batch_log(folder))?));
    option("open-mode", Some("append".to_owned()));
    let requeue = if spec.max_restarts > 0 {
        "--requeue"
    } else {
        "--no-requeue"
    };
    options.push(requeue.to_owned());
    Ok(options)
}

/// Cores of each node: one a rank where nothing is said.
fn cpus(spec: &JobSpec) -> Option<String> {
    let asked = spec.resources.cpus.map(|cpus| cpus.to_string());
    asked.or_else(|| {
        let ranks = spec.nproc_per_node.clone();
        ranks.parse::<usize>().is_ok().then_some(ranks)
    })
}

/// Starts the agents; their srun is `$agents`.
fn start(spec: &JobSpec, folder: &Path, files: &AgentFiles) -> Result<String> {
    let broadcast = &spec.options.slurm.broadcast;
    let (launcher, program) = match broadcast {
        Some(_) => (
            format!("\"$copy-{COPIED_LAUNCHER}\""),
            format!("\"$copy-{COPIED_PROGRAM}\""),
        ),
        None => (path_word(&files.launcher)?, path_word(&files.program)?),
    };
    let words = spec
        .agent()
        .join_timeout(JOIN_TIMEOUT)
        .grace(GRACE)
        .log_dir(path_text(&folder.join("logs"))?)
        .words();
    // The program's own word, where that of the node stands.
    let program_at = words.len() - spec.program.len();
    let words: Vec<String> = words
        .iter()
        .enumerate()
        .map(|(at, word)| match at {
            0 => launcher.clone(),
            at if at == program_at => program.clone(),
            _ => bash_word(word),
        })
        .collect();
    let mut script = String::new();
    let mut clear = String::new();
    if let Some(place) = broadcast {
        let place = path_word(place)?;
        let _ = write!(
            script,
            r#"copy={place}/"$SLURM_JOB_NAME-$SLURM_JOB_ID"
for file in {COPIED_LAUNCHER} {COPIED_PROGRAM}; do
    sbcast --force --preserve --size={BROADCAST_BLOCK} --timeout={BROADCAST_TIMEOUT} "$folder/$file" "$copy-$file" && continue
    srun rm -f "$copy-{COPIED_LAUNCHER}" "$copy-{COPIED_PROGRAM}"
    finish 1
done
"#
        );
        let _ = write!(
            clear,
            r#"rm -f "$2" "${{2%{COPIED_LAUNCHER}}}{COPIED_PROGRAM}"; "#
        );
    }
    let nodes = spec.nodes;
    let token = token::FILE;
    let cpus = cpus(spec)
        .map(|cpus| format!(" --cpus-per-task={cpus}"))
        .unwrap_or_default();
    let logs = bash_word(&format!("{}/node-%t.log", pattern(folder)?));
    // Where a node has no such folder, Slurm would start the agent in /tmp.
    let mut given = spec.options.slurm.sbatch_arg.iter();
    let working_dir = match &spec.working_dir {
        Some(folder) => path_word(&crate::spec::absolute(folder)?)?,
        None if given.any(|option| is_chdir(option)) => r#""$PWD""#.to_owned(),
        None => r#""$SLURM_SUBMIT_DIR""#.to_owned(),
    };
    let _ = write!(
        script,
        r#"export ACCEL_TOKEN_FILE="$folder/{token}"
set -- "$(type -P srun)" --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1{cpus} \
    --export=ALL --input=none --output={logs} --open-mode=append --kill-on-bad-exit=0 --wait={SRUN_WAIT} \
    /bin/bash -c 'trap : TERM; folder=$1; shift; cd "$folder" && "$@"; set -- $? "$1"; {clear}echo "$1" >"$0/{AGENT_EXIT}$SLURM_NODEID"; exit "$1"' \
    "$folder" {working_dir} {}
(
"#,
        words.join(" ")
    );
    for (name, value) in &spec.env {
        let _ = writeln!(script, "export {name}={}", bash_word(value));
    }
    script.push_str("exec \"$@\"\n) &\nagents=$!\n");
    Ok(script)
}

/// Waits for the agents, asks for another start where they do, and says how the job has ended.
fn wait(spec: &JobSpec) -> String {
    let mut script = format!(
        r#"
code=
until [ -n "$code" ]; do
    wait "$agents"
    ended=$?
    kill -0 "$agents" 2>/dev/null || code=$ended
done
# An agent that asks for another start tells more than one that was killed, and the first node's more than srun.
if grep -qsx {again} "$folder"/{AGENT_EXIT}*; then code={again}
elif [ -s "$folder/{AGENT_EXIT}0" ]; then code=$(<"$folder/{AGENT_EXIT}0"); fi
"#,
        again = accelerator_env::PREEMPTED_EXIT_CODE
    );
    if let Some(limit) = spec.time_limit.map(|limit| limit.as_secs())
        && limit >= NOTICED_FROM
    {
        let _ = writeln!(
            script,
            r#"if [ "$code" != 0 ] && [ "$SECONDS" -ge {} ]; then timed_out=true; fi"#,
            limit.saturating_sub(2 * NOTICE)
        );
    }
    if spec.max_restarts > 0 {
        let _ = write!(
            script,
            r#"if [ "$code" = {again} ] && ! "$signalled" && ! "$timed_out" && [ "$restarts" -lt {} ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit {again}
fi
"#,
            spec.max_restarts,
            again = accelerator_env::PREEMPTED_EXIT_CODE
        );
    }
    script.push_str("finish \"$code\"\n");
    script
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use super::*;
    use crate::spec::{EngineAddress, EngineKind, EngineOptions, Resources};

    fn spec(program: &[&str]) -> JobSpec {
        JobSpec {
            name: "mnist".parse().unwrap(),
            nonce: String::new(),
            engine: EngineKind::Slurm,
            nodes: NonZeroUsize::new(2).unwrap(),
            nproc_per_node: "4".to_owned(),
            resources: Resources::default(),
            time_limit: None,
            env: BTreeMap::new(),
            working_dir: None,
            max_restarts: 0,
            priority: None,
            tensorboard: false,
            logdir: "/training_logs".into(),
            program: program.iter().map(|&word| word.to_owned()).collect(),
            address: EngineAddress::default(),
            options: EngineOptions::default(),
        }
    }

    fn script(spec: &JobSpec, folder: &str) -> Result<String> {
        let files = AgentFiles {
            launcher: "/opt/accel/accel-launch".into(),
            program: "/home/user/train".into(),
        };
        render(spec, Path::new(folder), &files)
    }

    #[test]
    fn the_plainest_job() {
        let text = script(
            &spec(&["./train", "--epochs", "2"]),
            "/home/user/jobs/mnist",
        )
        .unwrap();
        assert_eq!(text, include_str!("fixtures/plain.sh"));
    }

    #[test]
    fn a_folder_that_is_given_to_sbatch_is_that_of_the_agents() {
        let mut spec = spec(&["./train"]);
        spec.options.slurm.sbatch_arg = vec!["--chdir=/scratch".to_owned()];
        let text = script(&spec, "/home/user/jobs/mnist").unwrap();
        assert!(text.contains(r#""$folder" "$PWD" /opt/accel"#), "{text}");
    }

    #[test]
    fn a_job_that_asks_for_everything() {
        let mut spec = spec(&["./train", "it's", "$launcher", "*", ""]);
        spec.resources = Resources {
            cpus: NonZeroUsize::new(8),
            gpus: 4,
            memory: Some("16Gi".parse().unwrap()),
        };
        spec.time_limit = Some(Duration::from_secs(93_784));
        spec.max_restarts = 3;
        spec.priority = Some("high".to_owned());
        spec.tensorboard = true;
        spec.working_dir = Some("/home/user/my work".into());
        spec.env = [
            ("EMPTY", ""),
            ("QUOTES", "it's \"$HOME\" `id`"),
            ("LINES", "a\r\n'b'\\\t\u{85}1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        let slurm = &mut spec.options.slurm;
        slurm.partition = Some("gpu".to_owned());
        slurm.account = Some("team".to_owned());
        slurm.constraint = Some("rack1|rack2".to_owned());
        slurm.sbatch_arg = vec!["--exclusive".to_owned(), "--comment=two words".to_owned()];
        slurm.broadcast = Some("/tmp".into());
        let text = script(&spec, "/home/user/100% mine/mnist").unwrap();
        assert_eq!(text, include_str!("fixtures/all.sh"));
    }

    #[test]
    fn an_option_cannot_add_another() {
        let mut bad = spec(&["./train"]);
        for value in ["a\n#SBATCH --uid=0", "a\"b", "a\\b", "a\rb"] {
            bad.options.slurm.partition = Some(value.to_owned());
            assert!(script(&bad, "/jobs").is_err(), "{value}");
        }
        assert!(script(&spec(&["./train"]), "/jobs/a\nb").is_err());
        let mut waiting = spec(&["./train"]);
        waiting.options.slurm.sbatch_arg = vec!["--wait-all-nodes=1".to_owned()];
        assert!(script(&waiting, "/jobs/a").is_ok());
        for option in ["--wait", "-W", "--array=1-3", "-a1-3", "--test-only"] {
            waiting.options.slurm.sbatch_arg = vec![option.to_owned()];
            assert!(script(&waiting, "/jobs/a").is_err(), "{option}");
        }
    }
}
