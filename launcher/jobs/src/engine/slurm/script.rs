//! The batch script of a job, and its options for sbatch.
//!
//! The script runs on the first node: it starts an agent on each node by srun, writes its state to the folder of the
//! job (`state.rs` reads it), and requests another start if the agents do. Its variables begin with `accel_`, so that
//! none of them hides a variable of the program.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use accelerator_host::cli::{Error, Result};

use super::options::{
    NOTICE, NOTICED_FROM, bash_word, cpus, is_chdir, options, path_text, path_word, pattern,
};
use super::state::{AGENT_EXIT, END, RUN, START_MARK};
use crate::engine::{TENSORBOARD_LOG, TOKEN_FILE};
use crate::output::shell_line;
use crate::spec::{JobSpec, launcher_here};

/// Seconds that agents wait for each other. All start at once, and only a new start of the job brings a lost one back.
const JOIN_TIMEOUT: u64 = 120;
/// Seconds that srun waits for the other agents once one has ended: longer than agents wait for each other.
const SRUN_WAIT: u64 = JOIN_TIMEOUT + 30;
/// Seconds that ranks have to save. If Slurm leaves them less (`KillWait`), it kills them itself.
const GRACE: u64 = NOTICE - 10;

/// The size of the blocks of a broadcast: small, so that a busy node answers to each within Slurm's own time limit.
const BROADCAST_BLOCK: &str = "1m";
const BROADCAST_TIMEOUT: u64 = 60;

/// The names of the copies of accel-launch and the program that `--broadcast` sends, in the folder of the job.
pub(super) const COPIED_LAUNCHER: &str = "accel-launch";
pub(super) const COPIED_PROGRAM: &str = "program";

/// Variables that bash uses itself, and does not pass on unchanged.
const OF_BASH: [&str; 39] = [
    "BASH",
    "BASHOPTS",
    "BASHPID",
    "BASH_ALIASES",
    "BASH_ARGC",
    "BASH_ARGV",
    "BASH_ARGV0",
    "BASH_CMDS",
    "BASH_COMMAND",
    "BASH_LINENO",
    "BASH_SOURCE",
    "BASH_SUBSHELL",
    "BASH_VERSINFO",
    "BASH_VERSION",
    "COMP_WORDBREAKS",
    "DIRSTACK",
    "EPOCHREALTIME",
    "EPOCHSECONDS",
    "EUID",
    "FUNCNAME",
    "GROUPS",
    "HISTCMD",
    "IFS",
    "LINENO",
    "OLDPWD",
    "OPTERR",
    "OPTIND",
    "PIPESTATUS",
    "PPID",
    "PS1",
    "PS4",
    "PWD",
    "RANDOM",
    "SECONDS",
    "SHELLOPTS",
    "SHLVL",
    "SRANDOM",
    "UID",
    "_",
];

/// The two files that every node runs.
#[derive(Clone, Debug)]
pub(super) struct AgentFiles {
    pub(super) launcher: PathBuf,
    pub(super) program: PathBuf,
}

impl AgentFiles {
    /// Finds the files of this machine.
    ///
    /// # Errors
    /// When one is missing.
    pub(super) fn here(spec: &JobSpec) -> Result<Self> {
        Ok(Self {
            launcher: launcher_here()?,
            program: spec.program_file()?,
        })
    }
}

/// The input of sbatch for a job.
#[derive(Clone, Debug)]
pub(super) struct Submission {
    /// The command line of sbatch, which overrides the variables `SBATCH_…` of the environment.
    pub(super) options: Vec<String>,
    pub(super) script: String,
}

impl Submission {
    /// Makes the submission of a job with that folder.
    ///
    /// # Errors
    /// When Slurm cannot run such a job; the message names the option.
    pub(super) fn of(spec: &JobSpec, folder: &Path, files: &AgentFiles) -> Result<Self> {
        Ok(Self {
            options: options(spec, folder)?,
            script: script(spec, folder, files)?,
        })
    }

    /// Returns it as a shell command.
    pub(super) fn shown(&self) -> String {
        let options = shell_line(&self.options);
        format!("sbatch {options} <<'SCRIPT'\n{}SCRIPT\n", self.script)
    }
}

fn script(spec: &JobSpec, folder: &Path, files: &AgentFiles) -> Result<String> {
    if let Some(name) = spec
        .env
        .keys()
        .find(|name| OF_BASH.contains(&name.as_str()))
    {
        return Err(Error::usage(format!(
            "--env {name}: the shell that starts the agents on Slurm has a variable {name} of its own; set it in the program"
        )));
    }
    let mut script = "#!/bin/bash\n".to_owned();
    // Writing to a string does not fail.
    let _ = write!(
        script,
        r#"
accel_folder={folder}
accel_restarts=${{SLURM_RESTART_COUNT:-0}}
accel_put() {{ printf '%s\n' "$2" >"$accel_folder/$1.new" && mv "$accel_folder/$1.new" "$accel_folder/$1"; }}
accel_finish() {{
    accel_put {END} "{{\"code\":$1,\"ended\":$(date +%s),\"signalled\":$accel_signalled,\"timed_out\":$accel_timed_out}}"
    exit "$1"
}}

SECONDS=0 accel_signalled=false accel_timed_out=false
trap 'accel_signalled=true' TERM
rm -f "$accel_folder"/{AGENT_EXIT}* "$accel_folder/{END}" "$accel_folder/{TENSORBOARD_LOG}"
accel_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "{START_MARK}$accel_restarts of job $SLURM_JOB_ID, on ${{accel_nodes//$'\n'/ }}"
accel_put {RUN} "{{\"restarts\":$accel_restarts,\"started\":$(date +%s),\"nodes\":[\"${{accel_nodes//$'\n'/\",\"}}\"]}}"
"#,
        folder = path_word(folder)?,
    );
    if spec.max_restarts > 0 {
        let _ = write!(
            script,
            "# Slurm starts a job again that has lost a node; the last time it does not.\n\
             [ \"$accel_restarts\" -lt {} ] || scontrol update JobId=\"$SLURM_JOB_ID\" Requeue=0\n",
            spec.max_restarts
        );
    }
    if spec.tensorboard {
        let _ = write!(
            script,
            "tensorboard --host \"$SLURMD_NODENAME\" --port 0 --logdir {} >\"$accel_folder/{TENSORBOARD_LOG}\" 2>&1 &\n\
             accel_tensorboard=$!\n\
             trap 'kill \"$accel_tensorboard\" 2>/dev/null' EXIT\n",
            path_word(&spec.logdir)?
        );
    }
    script.push_str(&start(spec, folder, files)?);
    script.push_str(&wait(spec));
    Ok(script)
}

/// Returns the commands that start the agents; their srun is `$accel_agents`.
fn start(spec: &JobSpec, folder: &Path, files: &AgentFiles) -> Result<String> {
    let broadcast = &spec.options.slurm.broadcast;
    let (launcher, program) = match broadcast {
        Some(_) => (
            format!("\"$accel_copy-{COPIED_LAUNCHER}\""),
            format!("\"$accel_copy-{COPIED_PROGRAM}\""),
        ),
        None => (path_word(&files.launcher)?, path_word(&files.program)?),
    };
    let words = spec
        .agent()
        .join_timeout(JOIN_TIMEOUT)
        .grace(GRACE)
        .log_dir(path_text(&folder.join("logs"))?)
        .words();
    // The program's own word, in place of that of the node.
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
            r#"accel_copy={place}/"$SLURM_JOB_NAME-$SLURM_JOB_ID"
for accel_file in {COPIED_LAUNCHER} {COPIED_PROGRAM}; do
    sbcast --force --preserve --size={BROADCAST_BLOCK} --timeout={BROADCAST_TIMEOUT} \
        "$accel_folder/$accel_file" "$accel_copy-$accel_file" && continue
    srun rm -f "$accel_copy-{COPIED_LAUNCHER}" "$accel_copy-{COPIED_PROGRAM}"
    accel_finish 1
done
"#
        );
        let _ = write!(
            clear,
            r#"/bin/rm -f "$2" "${{2%{COPIED_LAUNCHER}}}{COPIED_PROGRAM}"; "#
        );
    }
    let nodes = spec.nodes;
    let token = TOKEN_FILE;
    let cpus = cpus(spec)
        .map(|cpus| format!(" --cpus-per-task={cpus}"))
        .unwrap_or_default();
    let logs = bash_word(&format!("{}/node-%t.log", pattern(folder)?));
    // If a node had no such folder, Slurm would start the agent in /tmp.
    let mut given = spec.options.slurm.sbatch_arg.iter();
    let working_dir = match &spec.working_dir {
        Some(folder) => path_word(&crate::spec::absolute(folder)?)?,
        None if given.any(|option| is_chdir(option)) => r#""$PWD""#.to_owned(),
        None => r#""$SLURM_SUBMIT_DIR""#.to_owned(),
    };
    let _ = write!(
        script,
        r#"export ACCEL_TOKEN_FILE="$accel_folder/{token}"
set -- "$(type -P srun)" --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1{cpus} \
    --export=ALL --input=none --output={logs} --open-mode=append --kill-on-bad-exit=0 --wait={SRUN_WAIT} \
    /bin/bash -c 'trap : TERM; cd "$1" && "${{@:2}}"; set -- $? "$2"; {clear}echo "$1" >"$0/{AGENT_EXIT}$SLURM_NODEID"; exit "$1"' \
    "$accel_folder" {working_dir} {}
(
"#,
        words.join(" ")
    );
    for (name, value) in &spec.env {
        let _ = writeln!(script, "export {name}={}", bash_word(value));
    }
    script.push_str("exec \"$@\"\n) &\naccel_agents=$!\n");
    Ok(script)
}

/// Returns the commands that wait for the agents, ask for another start if they do, and record the end of the job.
fn wait(spec: &JobSpec) -> String {
    let mut script = format!(
        r#"
accel_code=
until [ -n "$accel_code" ]; do
    wait "$accel_agents"
    accel_ended=$?
    kill -0 "$accel_agents" 2>/dev/null || accel_code=$accel_ended
done
# An agent that asks for another start tells more than one that was killed, and the first node's more than srun.
if grep -qsx {again} "$accel_folder"/{AGENT_EXIT}*; then accel_code={again}
elif [ -s "$accel_folder/{AGENT_EXIT}0" ]; then accel_code=$(<"$accel_folder/{AGENT_EXIT}0"); fi
"#,
        again = accelerator_host::PREEMPTED_EXIT_CODE
    );
    if let Some(limit) = spec.time_limit.map(|limit| limit.as_secs())
        && limit >= NOTICED_FROM
    {
        let _ = writeln!(
            script,
            r#"if [ "$accel_code" != 0 ] && [ "$SECONDS" -ge {} ]; then accel_timed_out=true; fi"#,
            limit.saturating_sub(2 * NOTICE)
        );
    }
    if spec.max_restarts > 0 {
        let _ = write!(
            script,
            r#"if [ "$accel_code" = {again} ] && ! "$accel_signalled" && ! "$accel_timed_out" && [ "$accel_restarts" -lt {} ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit {again}
fi
"#,
            spec.max_restarts,
            again = accelerator_host::PREEMPTED_EXIT_CODE
        );
    }
    script.push_str("accel_finish \"$accel_code\"\n");
    script
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::NonZeroUsize;
    use std::process::Command;
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

    fn shown(spec: &JobSpec, folder: &str) -> Result<String> {
        let files = AgentFiles {
            launcher: "/opt/accel/accel-launch".into(),
            program: "/home/user/train".into(),
        };
        Ok(Submission::of(spec, Path::new(folder), &files)?.shown())
    }

    #[test]
    fn the_plainest_job() {
        let text = shown(
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
        let text = shown(&spec, "/home/user/jobs/mnist").unwrap();
        assert!(
            text.contains(r#""$accel_folder" "$PWD" /opt/accel"#),
            "{text}"
        );
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
        let text = shown(&spec, "/home/user/100% mine/mnist").unwrap();
        assert_eq!(text, include_str!("fixtures/all.sh"));
    }

    #[test]
    fn what_slurm_would_read_otherwise_is_refused() {
        let mut bad = spec(&["./train"]);
        bad.options.slurm.partition = Some("a\nJobState=RUNNING".to_owned());
        assert!(shown(&bad, "/jobs").is_err());
        for folder in ["/jobs/a\nb", "/jobs/a\\b"] {
            assert!(shown(&spec(&["./train"]), folder).is_err(), "{folder}");
        }
        let mut given = spec(&["./train"]);
        given.env.insert("UID".to_owned(), "5".to_owned());
        assert!(
            shown(&given, "/jobs")
                .unwrap_err()
                .to_string()
                .contains("--env UID")
        );
    }

    #[test]
    fn variables_that_bash_does_not_pass_on_are_refused() {
        let run = |script: &str| {
            let mut bash = Command::new("bash");
            bash.args(["--noprofile", "--norc", "-c", script])
                .env_clear();
            bash.output()
        };
        let known = match run("compgen -v") {
            Ok(known) => String::from_utf8(known.stdout).unwrap(),
            Err(error) => return println!("skipped, since bash does not start: {error}"),
        };
        assert!(known.contains("BASH_VERSION"), "{known}");
        for name in known.lines() {
            // Exported as in the script of a job.
            let shown = run(&format!("(export {name}=given; exec /usr/bin/env)")).unwrap();
            let shown = String::from_utf8(shown.stdout).unwrap();
            let arrives = shown.lines().any(|line| line == format!("{name}=given"));
            assert!(arrives || OF_BASH.contains(&name), "{name}");
        }
    }
}
