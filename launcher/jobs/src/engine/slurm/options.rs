//! The options of sbatch, and words of bash.

use std::fmt::Write;
use std::path::Path;

use accelerator_host::cli::{Error, Result};
use accelerator_host::text::shell_word;

use super::state::batch_log;
use crate::spec::JobSpec;

/// The time in seconds, before its time limit, at which a job gets a signal if the limit is long enough; Slurm may be a
/// minute early.
pub(super) const NOTICE: u64 = 60;
pub(super) const NOTICED_FROM: u64 = 600;

const ONE_JOB: &str =
    "a job is submitted as one, and at once; `accel-launch jobs wait NAME` waits for its end";
const THIS_CLUSTER: &str =
    "a job is asked of the cluster of this login node; submit it where the other cluster is";

/// Options with which `jobs` could not find a job again, or would show another one: their long and short names, and the
/// remedy.
const REFUSED: [(&str, Option<char>, &str); 8] = [
    ("array", Some('a'), ONE_JOB),
    ("wait", Some('W'), ONE_JOB),
    ("test-only", None, "--dry-run shows what would be submitted"),
    ("clusters", Some('M'), THIS_CLUSTER),
    (
        "output",
        Some('o'),
        "the job is known by the file of its output; `accel-launch jobs logs NAME` shows it",
    ),
    ("job-name", Some('J'), "--name gives the job its name"),
    ("quiet", Some('Q'), "sbatch has to print the job's number"),
    ("wrap", None, "the program stands behind --"),
];

/// Refused variables, which none of our options overrides.
const REFUSED_VARIABLES: [(&str, &str); 4] = [
    ("SBATCH_ARRAY_INX", ONE_JOB),
    ("SBATCH_WAIT", ONE_JOB),
    ("SBATCH_CLUSTERS", THIS_CLUSTER),
    ("SLURM_CLUSTERS", THIS_CLUSTER),
];

/// Short options that take no value, so that another may follow in the same word.
const WITHOUT_VALUE: &str = "HIOVhksuv";

/// Returns the options of sbatch: those that follow from the options of all engines, and then those of --sbatch-arg,
/// which may override them.
///
/// # Errors
/// When an option cannot be given to Slurm; the message names it.
pub(super) fn options(spec: &JobSpec, folder: &Path) -> Result<Vec<String>> {
    let slurm = &spec.options.slurm;
    let resources = &spec.resources;
    let mut options = vec!["--parsable".to_owned()];
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
    for given in &slurm.sbatch_arg {
        check_given(given)?;
    }
    options.extend_from_slice(&slurm.sbatch_arg);
    options.iter().try_for_each(|option| check_option(option))?;
    Ok(options)
}

/// Fails if a variable would make several jobs, or one on another cluster.
///
/// # Errors
/// When there is such a variable; the message names it.
pub(super) fn check_environment() -> Result<()> {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    match REFUSED_VARIABLES.iter().find(|(name, _)| is_set(name)) {
        Some((name, why)) => Err(Error::usage(format!(
            "{name} is set in the environment: {why}; unset it"
        ))),
        None => Ok(()),
    }
}

/// Returns the cores of each node: one per rank unless the job asks for a number.
pub(super) fn cpus(spec: &JobSpec) -> Option<String> {
    let asked = spec.resources.cpus.map(|cpus| cpus.to_string());
    asked.or_else(|| {
        let ranks = spec.nproc_per_node.clone();
        ranks.parse::<usize>().is_ok().then_some(ranks)
    })
}

/// Returns `true` if it is sbatch's own option for the folder of the job.
pub(super) fn is_chdir(option: &str) -> bool {
    is_option(option, "chdir", Some('D'))
}

/// Refuses values that --sbatch-arg must not have.
fn check_given(option: &str) -> Result<()> {
    let refuse = |why: &str| Err(Error::usage(format!("--sbatch-arg {option}: {why}")));
    let refused = REFUSED
        .iter()
        .find(|(long, short, _)| is_option(option, long, *short));
    if let Some((_, _, why)) = refused {
        return refuse(why);
    }
    let Some(letters) = option
        .strip_prefix('-')
        .filter(|rest| !rest.is_empty() && *rest != "-")
    else {
        // sbatch would take it for a script.
        return refuse("it is no option; give a value as in --sbatch-arg=--begin=now+1");
    };
    let hides_another = letters.len() > 1 && letters.starts_with(|c| WITHOUT_VALUE.contains(c));
    match hides_another {
        true => refuse("give each short option by an --sbatch-arg of its own"),
        false => Ok(()),
    }
}

/// Returns `true` if `word` is the option with these names. sbatch accepts abbreviated long names.
fn is_option(word: &str, long: &str, short: Option<char>) -> bool {
    match word.strip_prefix("--") {
        Some(rest) => {
            let name = rest.split('=').next().unwrap_or_default();
            !name.is_empty() && long.starts_with(name)
        }
        None => {
            let letter = word.strip_prefix('-').and_then(|rest| rest.chars().next());
            letter.is_some() && letter == short
        }
    }
}

/// Refuses an option of sbatch that would break the parsing of Slurm's output about the job.
///
/// # Errors
/// When the option has a control character.
fn check_option(option: &str) -> Result<()> {
    match option.contains(char::is_control) {
        true => Err(Error::usage(format!(
            "{option:?} cannot stand among the options of sbatch: it has a control character"
        ))),
        false => Ok(()),
    }
}

/// Escapes a path so that Slurm replaces nothing in it.
///
/// # Errors
/// When the path is not text, or has a backslash, which Slurm would remove.
pub(super) fn pattern(path: &Path) -> Result<String> {
    let text = path_text(path)?;
    match text.contains('\\') {
        true => Err(Error::usage(format!(
            "{text} has a backslash, which Slurm removes from names of files; give another folder by --jobs-dir"
        ))),
        false => Ok(text.replace('%', "%%")),
    }
}

/// Quotes a word for bash: in `$'…'` if it has control characters, since Slurm refuses scripts with carriage returns.
pub(super) fn bash_word(word: &str) -> String {
    if !word.contains(char::is_control) {
        return shell_word(word);
    }
    let mut quoted = "$'".to_owned();
    for character in word.chars() {
        match character {
            '\'' | '\\' => quoted.extend(['\\', character]),
            // Up to two bytes in UTF-8; a digit that follows must not be taken for one of the escape.
            control if control.is_control() => {
                let mut bytes = [0; 4];
                for byte in control.encode_utf8(&mut bytes).bytes() {
                    // Writing to a string does not fail.
                    let _ = write!(quoted, "\\{byte:03o}");
                }
            }
            other => quoted.push(other),
        }
    }
    quoted.push('\'');
    quoted
}

/// Quotes a path for bash.
///
/// # Errors
/// When the path is not text.
pub(super) fn path_word(path: &Path) -> Result<String> {
    Ok(bash_word(&path_text(path)?))
}

/// Returns a path as text.
///
/// # Errors
/// When the path is not text.
pub(super) fn path_text(path: &Path) -> Result<String> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        Error::usage(format!(
            "{} is not text in UTF-8, as a script of Slurm's has to be",
            path.display()
        ))
    })
}

/// Writes a time as Slurm does: `1-02:03:04`.
pub(super) fn clock(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let time = format!("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    match days {
        0 => time,
        days => format!("{days}-{time}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_would_hide_the_job_are_refused() {
        for option in [
            "--wait",
            "-W",
            "--array=1-3",
            "-a1-3",
            "--test-only",
            "--output=/x",
            "--outp=/x",
            "-o/x",
            "-o /x",
            "--clusters=b",
            "-Mb",
            "--cl=b",
            "-HMb",
            "-Ho/x",
            "--wrap=true",
            "--quiet",
            "--job-name=b",
            "-Jb",
            "gpu",
            "-",
            "--",
            "",
        ] {
            let error = check_given(option).unwrap_err().to_string();
            assert!(error.starts_with("--sbatch-arg "), "{error}");
        }
        for option in [
            "--wait-all-nodes=1",
            "--exclusive",
            "-H",
            "-pgpu",
            "-xnode7",
            "--begin=now+1",
            "--time=1",
            "--comment=-o /x",
            "--chdir=/x",
            "-D/x",
            "--open-mode=truncate",
        ] {
            check_given(option).unwrap();
        }
        assert!(is_chdir("--chdir=/x") && is_chdir("--chd=/x") && is_chdir("-D/x"));
        assert!(!is_chdir("--comment=--chdir"));
    }

    #[test]
    fn bash_reads_what_was_written() {
        for value in [
            "",
            "a b",
            "it's",
            "a\r\n'b'\\\t\u{85}1$x",
            "-n",
            "é\n*",
            "\u{1}2",
        ] {
            let line = format!("printf %s {}", bash_word(value));
            assert!(!line.contains(char::is_control), "{line}");
            let read = std::process::Command::new("bash")
                .args(["-c", &line])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(read.stdout).unwrap(), value);
        }
    }

    #[test]
    fn times_are_those_of_a_clock() {
        for (seconds, text) in [(1, "00:00:01"), (7384, "02:03:04"), (93_784, "1-02:03:04")] {
            assert_eq!(clock(seconds), text);
        }
    }
}
