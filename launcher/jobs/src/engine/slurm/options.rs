//! The options of sbatch.

use std::path::Path;

use super::quote::{check_option, clock, path_text, pattern};
use super::run::batch_log;
use crate::error::{Error, Result};
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

/// Returns true if it is sbatch's own option for the folder of the job.
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

/// Returns true if `word` is the option with these names. sbatch accepts abbreviated long names.
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
}
