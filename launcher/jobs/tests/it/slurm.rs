//! The engine Slurm, with stand-ins for its commands.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use crate::support::{Jobs, Printed, launcher};

/// A folder with Slurm commands, each a script that first records its call.
pub(crate) struct Commands {
    folder: TempDir,
}

const BUSY: &str = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1";

impl Commands {
    pub(crate) fn new(commands: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, script) in commands {
            let path = folder.path().join(name);
            let calls = folder.path().join("calls");
            let script = format!(
                "#!/bin/sh\necho {name} \"$@\" >>{}\n{script}\n",
                calls.display()
            );
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { folder }
    }

    pub(crate) fn path(&self) -> String {
        format!(
            "{}:{}",
            self.folder.path().display(),
            std::env::var("PATH").unwrap()
        )
    }

    /// Returns the calls since the last time.
    fn calls(&self) -> Vec<String> {
        let path = self.folder.path().join("calls");
        let calls = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        calls.lines().map(str::to_owned).collect()
    }
}

fn submit(jobs: &Jobs, commands: &Commands, name: &str, options: &str) -> Printed {
    launcher();
    let line = format!("submit --engine slurm --name {name} {options} -- true");
    jobs.run_with(&line, &[("PATH", &commands.path())])
}

#[test]
fn a_controller_that_does_not_answer_is_asked_once_for_all_jobs() {
    let jobs = Jobs::new();
    let commands = Commands::new(&[("sbatch", "cat >/dev/null; echo 7"), ("scontrol", BUSY)]);
    for name in ["a", "b", "c"] {
        assert_eq!(submit(&jobs, &commands, name, "").code, Some(0));
    }
    commands.calls();
    let listed = jobs.run_with("list", &[("PATH", &commands.path())]);
    assert_eq!(listed.code, Some(0));
    assert_eq!(listed.stdout.matches("UNKNOWN").count(), 3, "{listed:?}");
    assert_eq!(listed.stderr.matches("warning: ").count(), 1, "{listed:?}");
    assert!(
        listed
            .stderr
            .contains("its jobs are shown in their last known state"),
        "{listed:?}"
    );
    assert_eq!(commands.calls().len(), 1);
}

/// Slurm had taken the job when its answer was lost.
#[test]
fn a_job_that_slurm_may_have_taken_is_cancelled() {
    let jobs = Jobs::new();
    let squeue = format!(
        "echo '6|/elsewhere/a/batch.log|'; echo '7|{}/a/batch.log|'",
        jobs.folder().display()
    );
    let timed_out = "cat >/dev/null; echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1";
    let commands = Commands::new(&[("sbatch", timed_out), ("squeue", &squeue), ("scancel", "")]);
    let submitted = submit(&jobs, &commands, "a", "");
    assert_eq!(submitted.code, Some(75), "{submitted:?}");
    assert!(submitted.stderr.contains("try again"), "{submitted:?}");
    assert_eq!(commands.calls().last().unwrap(), "scancel 7");
    assert!(!Path::new(&jobs.folder().join("a")).exists());

    let commands = Commands::new(&[("sbatch", timed_out), ("squeue", BUSY)]);
    let submitted = submit(&jobs, &commands, "a", "");
    assert!(
        submitted
            .stderr
            .contains("Slurm may have taken the job all the same"),
        "{submitted:?}"
    );
}

#[test]
fn options_that_the_engine_ignores_are_named() {
    let jobs = Jobs::new();
    let commands = Commands::new(&[("sbatch", "cat >/dev/null; echo 7")]);
    let options = "--kind trainjob --namespace team --partition gpu --dry-run";
    let submitted = submit(&jobs, &commands, "a", options);
    let warning = "warning: the engine slurm ignores --kind, --namespace\n";
    assert_eq!(
        (submitted.code, submitted.stderr.as_str()),
        (Some(0), warning)
    );

    let line = "submit --name a --memory 1Gi --priority high --dry-run -- true";
    let warning = "warning: the engine local ignores --memory, --priority\n";
    assert_eq!(jobs.run(line).stderr, warning);
}

/// A controller that lost its state reuses the same numbers.
#[test]
fn a_number_that_slurm_gave_to_another_job_is_not_touched() {
    let jobs = Jobs::new();
    let other = "printf 'JobId=7 JobName=b\\n JobState=RUNNING Restarts=0 ExitCode=0:0\\n StdOut=/elsewhere/b/batch.log\\n'";
    let commands = Commands::new(&[
        ("sbatch", "cat >/dev/null; echo 7"),
        ("scontrol", other),
        ("scancel", ""),
    ]);
    assert_eq!(submit(&jobs, &commands, "a", "").code, Some(0));
    let run = |words: &str| jobs.run_with(words, &[("PATH", &commands.path())]);
    let found = run("get a");
    assert!(
        found.stderr.contains("given the number 7 to another job"),
        "{found:?}"
    );
    let stopped = run("stop a").stdout;
    assert!(
        stopped.contains("is gone: Slurm has given the number 7 to another job"),
        "{stopped}"
    );
    assert!(
        !commands
            .calls()
            .iter()
            .any(|call| call.starts_with("scancel"))
    );
}

#[test]
fn sbatch_has_to_give_a_number() {
    let jobs = Jobs::new();
    let commands = Commands::new(&[("sbatch", "cat >/dev/null")]);
    let submitted = submit(&jobs, &commands, "a", "");
    assert!(
        submitted
            .stderr
            .contains("expected the number of a job from sbatch"),
        "{submitted:?}"
    );
}

/// Folders are compared as paths, which may have blanks. Users' text may look like a field. `scontrol` shows a `%` in a
/// folder differently.
#[test]
fn a_job_is_known_by_the_folder_of_its_output() {
    for (folder, name, of, shown) in [
        ("a b", "a", "a", "STATUS: RUNNING"),
        ("a b", "c", "cd", "another job"),
        ("100% %j", "a", "a", "STATUS: RUNNING"),
    ] {
        let jobs = Jobs::in_folder_named(folder);
        let output = jobs.folder().join(of).join("slurm.log");
        let scontrol = format!(
            "cat <<'END'\nJobId=7 JobName={name}\n   JobState=RUNNING Restarts=0 ExitCode=0:0\n   Comment=x StdOut=/x\n   \
             StdOut={}\nEND",
            output
                .display()
                .to_string()
                .replace("100%", "100%%")
                .replace("%j", "%7")
        );
        let commands = Commands::new(&[
            ("sbatch", "cat >/dev/null; echo 7"),
            ("scontrol", &scontrol),
        ]);
        assert_eq!(submit(&jobs, &commands, name, "").code, Some(0));
        let found = jobs.run_with(&format!("get {name}"), &[("PATH", &commands.path())]);
        let said = found.stdout + &found.stderr;
        assert!(said.contains(shown), "{folder}, {name}: {said}");
    }
}

/// A stand-in for sbatch that resolves options like the real one: its command line overrides the environment, which
/// overrides the script.
const SBATCH: &str = r#"script=$(cat)
for name in partition account qos time constraint requeue; do
    case $name in time) variable=SBATCH_TIMELIMIT ;; *) variable=SBATCH_$(echo $name | tr a-z A-Z) ;; esac
    value=$(printf '%s\n' "$script" | sed -n "s/^#SBATCH \"*--$name=\([^\"]*\).*/\1/p" | tail -n 1)
    eval "value=\${$variable:-\$value}"
    for word; do case $word in --$name=*) value=${word#*=} ;; esac; done
    echo "$name=$value" >>"$RESOLVED"
done
echo 7"#;

#[test]
fn options_count_more_than_the_environment() {
    let jobs = Jobs::new();
    let commands = Commands::new(&[("sbatch", SBATCH)]);
    let resolved = jobs.folder().join("_resolved");
    let printed = jobs.run_with(
        "submit --engine slurm --name a --partition p --account a --priority q --time 1h -- true",
        &[
            ("PATH", &commands.path()),
            ("RESOLVED", resolved.to_str().unwrap()),
            ("SBATCH_PARTITION", "other"),
            ("SBATCH_ACCOUNT", "other"),
            ("SBATCH_QOS", "other"),
            ("SBATCH_TIMELIMIT", "1"),
            ("SBATCH_CONSTRAINT", "site"),
        ],
    );
    assert_eq!(printed.code, Some(0), "{printed:?}");
    assert_eq!(
        fs::read_to_string(resolved).unwrap(),
        "partition=p\naccount=a\nqos=q\ntime=01:00:00\nconstraint=site\nrequeue=\n"
    );
}

#[test]
fn what_would_hide_a_job_is_refused() {
    let jobs = Jobs::new();
    let commands = Commands::new(&[("sbatch", "cat >/dev/null; echo 7")]);
    for option in ["--output=/tmp/x", "-o/tmp/x", "--clusters=b", "-Mb"] {
        let option = format!("--sbatch-arg={option}");
        let submitted = submit(&jobs, &commands, "a", &option);
        assert_eq!(submitted.code, Some(2), "{submitted:?}");
        assert!(submitted.stderr.contains(&option[2..12]), "{submitted:?}");
    }
    for variable in ["SBATCH_ARRAY_INX", "SBATCH_WAIT", "SLURM_CLUSTERS"] {
        let line = "submit --engine slurm --name a -- true";
        let submitted = jobs.run_with(line, &[("PATH", &commands.path()), (variable, "1")]);
        assert_eq!(submitted.code, Some(2), "{submitted:?}");
        assert!(submitted.stderr.contains(variable), "{submitted:?}");
    }
    assert_eq!(commands.calls(), [""; 0]);
    assert!(!jobs.folder().join("a").exists());
}

/// A job whose number cannot be read must not be left running.
#[test]
fn a_job_whose_number_sbatch_does_not_say_is_cancelled() {
    let jobs = Jobs::new();
    let squeue = format!("echo '7|{}/a/slurm.log|'", jobs.folder().display());
    let commands = Commands::new(&[
        ("sbatch", "cat >/dev/null"),
        ("squeue", &squeue),
        ("scancel", ""),
    ]);
    assert_eq!(submit(&jobs, &commands, "a", "").code, Some(1));
    assert_eq!(commands.calls().last().unwrap(), "scancel 7");
}

/// A query of Slurm during which other commands run.
struct SlowQuestion {
    jobs: Jobs,
    commands: Commands,
}

impl SlowQuestion {
    /// Submits job `a`, asks Slurm about it, runs `meanwhile`, and then lets Slurm answer that the job runs.
    fn ask(question: &str, meanwhile: impl FnOnce(&Self)) -> Self {
        let jobs = Jobs::new();
        let folder = jobs.folder().display();
        let running = format!(
            "printf 'JobId=7 JobName=a\\n JobState=RUNNING Restarts=0 ExitCode=0:0\\n StdOut={folder}/a/slurm.log\\n'"
        );
        let slow = format!(
            "touch {folder}/_asked; for _ in $(seq 1000); do [ -e {folder}/_answer ] && break; sleep 0.05; done; {running}"
        );
        let cancelled = format!(
            "[ -e {folder}/_cancelled ] && echo 'Invalid job id specified' >&2 && exit 1; {running}"
        );
        let scancel = format!("touch {folder}/_cancelled");
        let sbatch = ("sbatch", "cat >/dev/null; echo 7");
        let commands = Commands::new(&[sbatch, ("scontrol", &cancelled), ("scancel", &scancel)]);
        let slow = Commands::new(&[sbatch, ("scontrol", &slow)]);
        let this = Self { jobs, commands };
        assert_eq!(submit(&this.jobs, &this.commands, "a", "").code, Some(0));
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| this.jobs.run_with(question, &[("PATH", &slow.path())]));
            while !this.jobs.folder().join("_asked").exists() {
                assert!(!asked.is_finished(), "{:?}", asked.join());
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            meanwhile(&this);
            fs::write(this.jobs.folder().join("_answer"), "").unwrap();
        });
        this
    }

    fn run(&self, words: &str) -> Printed {
        self.jobs
            .run_with(words, &[("PATH", &self.commands.path())])
    }

    fn record(&self) -> serde_json::Value {
        self.jobs.json("a", "job.json")
    }
}

#[test]
fn how_a_job_ended_is_not_overwritten_by_an_older_answer() {
    for question in ["get a", "list", "wait a"] {
        let slow = SlowQuestion::ask(question, |slow| {
            let stopped = slow.run("stop a");
            assert_eq!(stopped.stdout, "job a stopped\n", "{stopped:?}");
        });
        assert_eq!(slow.record()["last"]["status"], "STOPPED", "{question:?}");
    }
}

#[test]
fn an_older_answer_is_not_written_into_the_record_of_another_job() {
    let slow = SlowQuestion::ask("get a", |slow| {
        slow.run("stop --forget a");
        let again = [("sbatch", "cat >/dev/null; echo 8")];
        let submitted = submit(&slow.jobs, &Commands::new(&again), "a", "");
        assert_eq!(submitted.code, Some(0), "{submitted:?}");
    });
    let record = slow.record();
    assert_eq!(
        (&record["id"], &record["last"]),
        (&"8".into(), &serde_json::Value::Null)
    );
}
