//! Slurm's variables: those of a task of a step, and those of a job outside of its steps; and Slurm's lists, of hosts
//! and of the tasks on each.
//!
//! ```text
//! hosts := item { ("," | space) item }      item  := text { "[" range {"," range} "]" text }
//! tasks := count { "," count }              range := digits [ "-" digits ]       count := number [ "(x" times ")" ]
//! ```

use super::{
    place::{DerivedStore, HostPlace, MeetingPlace, Place, PlaceVariables, derived_port},
    reader::{LaunchReader, LaunchSource},
};
use crate::error::{Error, Result};

/// A task of a step. Variables of the job, such as `SLURM_NTASKS`, say nothing about it.
pub(super) const STEP: PlaceVariables = PlaceVariables {
    launcher: "Slurm",
    rank: "SLURM_PROCID",
    world_size: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_world_size: TASKS_PER_NODE,
};

/// The place of a process in its step; `None` if the process is not a task of a step.
pub(super) fn task(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    let Some(step) = SlurmStep::read(vars)? else {
        return Ok(None);
    };
    let place = Place {
        source: LaunchSource {
            launcher: STEP.launcher,
            variable: STEP.rank,
        },
        rank: step.task,
        world_size: step.tasks,
        local: match step.tasks {
            1 => HostPlace::RankAndSize(0, 1),
            _ => HostPlace::RankAndSize(step.local_task, step.tasks_per_node[step.node]),
        },
        names: &STEP,
        meeting: step.meeting(vars),
    };
    place.check()?;
    Ok(Some(place))
}

/// Rejects a process that belongs to a job with several tasks or hosts but is not a task of a step, such as the body of
/// a batch script or a shell of `salloc`.
///
/// # Errors
///
/// A topology error that names the variables and what to do.
pub(super) fn outside(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    const COUNTS: [&str; 3] = ["SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"];
    for name in COUNTS {
        if vars.number(name)?.is_some_and(|count| count > 1) {
            return Err(Error::topology(format!(
                "this process belongs to a job of Slurm ({}), but is no task of a step, so it would train \
                 alone: start it with `srun`, which tells each task its place; for a single process, set \
                 RANK=0 and WORLD_SIZE=1",
                vars.shown(&["SLURM_JOB_ID", name, STEP.rank, STEP_ID])
            )));
        }
    }
    Ok(None)
}

/// One task of a step, as its variables describe it.
pub(super) struct SlurmStep {
    job: String,
    step: u64,
    pub(super) task: usize,
    pub(super) tasks: usize,
    pub(super) local_task: usize,
    pub(super) node: usize,
    pub(super) hosts: Vec<String>,
    pub(super) tasks_per_node: Vec<usize>,
}

impl SlurmStep {
    /// Reads the task that this process runs as; returns `None` if it is not a task of a step.
    ///
    /// # Errors
    ///
    /// A topology error if the variables are incomplete, malformed or contradict one another.
    pub(super) fn read(vars: LaunchReader<'_>) -> Result<Option<Self>> {
        let (Some(task), Some(step)) = (vars.number(STEP.rank)?, step_id(vars)) else {
            return Ok(None);
        };
        let tasks = vars.required(STEP.world_size, &TASK)?;
        let mut found = Self {
            job: vars.text("SLURM_JOB_ID").unwrap_or_default(),
            step,
            task,
            tasks,
            local_task: 0,
            node: 0,
            hosts: vec!["127.0.0.1".to_owned()],
            tasks_per_node: vec![1],
        };
        if tasks <= 1 {
            return Ok(Some(found));
        }
        found.local_task = vars.required(STEP.local_rank, &TASK)?;
        found.node = vars.required(NODE, &TASK)?;
        found.hosts = list(vars, NODES, hosts)?;
        found.tasks_per_node = list(vars, TASKS_PER_NODE, tasks_per_node)?;
        found.check(vars)?;
        Ok(Some(found))
    }

    pub(super) fn head(&self) -> &str {
        match self.hosts.first() {
            Some(head) if self.hosts.len() > 1 => head,
            _ => "127.0.0.1",
        }
    }

    /// The port where the ranks, or the agents, of this step meet unless a variable says otherwise.
    pub(super) fn port(&self) -> u16 {
        let job: u64 = self.job.parse().unwrap_or(0);
        derived_port(job.wrapping_add(257 * self.step))
    }

    /// The name of the job, which differs from step to step.
    pub(super) fn name(&self) -> String {
        format!("slurm-{}.{}", self.job, self.step)
    }

    fn meeting(&self, vars: LaunchReader<'_>) -> MeetingPlace {
        if is_arbitrary(vars) && self.hosts.len() > 1 {
            return MeetingPlace::Unknown(format!(
                "with {} rank 0 may be on any host of {NODES}; start the step with `srun --mpi=pmi2`, which \
                 lets rank 0 share its address, or ",
                vars.shown(&[DISTRIBUTION])
            ));
        }
        MeetingPlace::Store(DerivedStore {
            host: self.head().to_owned(),
            port: self.port(),
            job: self.name(),
        })
    }

    fn check(&self, vars: LaunchReader<'_>) -> Result<()> {
        let shown = |names: &[&str]| vars.shown(names);
        let (hosts, counts) = (self.hosts.len(), self.tasks_per_node.len());
        if hosts != counts {
            return Err(Error::topology(format!(
                "{NODES} has {hosts} hosts, but {TASKS_PER_NODE} counts the tasks of {counts} ({})",
                shown(&[NODES, TASKS_PER_NODE])
            )));
        }
        let sum: usize = self.tasks_per_node.iter().sum();
        if sum != self.tasks {
            return Err(Error::topology(format!(
                "{} is {}, but {TASKS_PER_NODE} counts {sum} ({})",
                STEP.world_size,
                self.tasks,
                shown(&[TASKS_PER_NODE])
            )));
        }
        if self.node >= hosts {
            return Err(Error::topology(format!(
                "{NODE} is {}, but {NODES} has {hosts} hosts ({})",
                self.node,
                shown(&[NODES])
            )));
        }
        match self.task == 0 && self.node != 0 && !is_arbitrary(vars) {
            true => Err(Error::topology(format!(
                "{} is 0, but {NODE} is {}: rank 0 is on the first host of {NODES}",
                STEP.rank, self.node
            ))),
            false => Ok(()),
        }
    }
}

/// Returns `true` if a list from the user places the tasks.
fn is_arbitrary(vars: LaunchReader<'_>) -> bool {
    vars.text(DISTRIBUTION)
        .is_some_and(|how| how.starts_with("arbitrary"))
}

/// The number of the step, if the variables are those of one that `srun` has started.
fn step_id(vars: LaunchReader<'_>) -> Option<u64> {
    /// Numbers from here on, and negative ones, stand for the batch script, the shell of `salloc` and the like.
    const FIRST_SPECIAL: u64 = 0xffff_fff0;
    match vars.text(STEP_ID) {
        Some(id) => id.trim().parse().ok().filter(|id| *id < FIRST_SPECIAL),
        // The body of a batch script has none of a step's variables.
        None => vars.is_set(STEP.world_size).then_some(0),
    }
}

fn list<T>(
    vars: LaunchReader<'_>,
    name: &str,
    read: fn(&str) -> Result<Vec<T>, String>,
) -> Result<Vec<T>> {
    let Some(text) = vars.text(name) else {
        return Err(Error::topology(format!(
            "{name} is not set, unlike {}",
            vars.shown(&TASK)
        )));
    };
    read(&text).map_err(|why| Error::topology(format!("{name} is {text:?}: {why}")))
}

/// The variables that every task has.
const TASK: [&str; 2] = [STEP.rank, STEP.world_size];
const STEP_ID: &str = "SLURM_STEP_ID";
const NODE: &str = "SLURM_NODEID";
const NODES: &str = "SLURM_STEP_NODELIST";
const TASKS_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";
const DISTRIBUTION: &str = "SLURM_DISTRIBUTION";

/// The hosts of a list as Slurm writes it, in its order; of several groups in brackets, the leftmost varies slowest.
///
/// ```
/// use accelerator_collective::internal::expand_hosts;
///
/// # fn main() -> accelerator_collective::Result<()> {
/// assert_eq!(expand_hosts("rack[1-2]n[08-09],login")?, ["rack1n08", "rack1n09", "rack2n08", "rack2n09", "login"]);
/// assert!(expand_hosts("node[3-1]").unwrap_err().is_topology());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// A topology error that says what is wrong with the text, also if it names no host or more than 65,536.
pub fn expand_hosts(list: &str) -> Result<Vec<String>> {
    hosts(list).map_err(|error| Error::topology(format!("the list of hosts {list:?}: {error}")))
}

/// The hosts of a list such as `rack[1-2]n[08-10],login`, in its order; of several groups, the leftmost varies slowest.
///
/// # Errors
///
/// A text that says what is wrong with the list.
pub(super) fn hosts(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for item in items(list)? {
        hosts.extend(expand(item)?);
        if hosts.len() > MOST_HOSTS {
            return Err(too_many());
        }
    }
    match hosts.is_empty() {
        true => Err("it names no host".to_owned()),
        false => Ok(hosts),
    }
}

/// The counts of a list such as `2(x3),1`: 2, 2, 2, 1.
///
/// # Errors
///
/// A text that says what is wrong with the list.
pub(super) fn tasks_per_node(list: &str) -> Result<Vec<usize>, String> {
    let mut counts = Vec::new();
    for item in list.split(',') {
        let item = item.trim();
        let (count, times) = match item.split_once("(x") {
            None => (item, "1"),
            Some((count, rest)) => {
                let times = rest.strip_suffix(')');
                (count, times.ok_or_else(|| format!("{item:?} has no `)`"))?)
            }
        };
        let (count, times) = (number(count)?, number(times)?);
        if counts.len() + times > MOST_HOSTS {
            return Err(too_many());
        }
        counts.extend(std::iter::repeat_n(count, times));
    }
    Ok(counts)
}

/// The items of a list. Separators within brackets belong to an item.
fn items(list: &str) -> Result<Vec<&str>, String> {
    let mut items = Vec::new();
    let (mut start, mut is_inside) = (0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if is_inside => return Err("a `[` stands within brackets".to_owned()),
            ']' if !is_inside => return Err("a `]` has no `[`".to_owned()),
            '[' | ']' => is_inside = letter == '[',
            _ if !is_inside && (letter == ',' || letter.is_ascii_whitespace()) => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err("a `[` has no `]`".to_owned());
    }
    items.push(&list[start..]);
    items.retain(|item| !item.is_empty());
    Ok(items)
}

/// The hosts of one item, whose brackets match.
fn expand(item: &str) -> Result<Vec<String>, String> {
    let Some((before, rest)) = item.split_once('[') else {
        return Ok(vec![item.to_owned()]);
    };
    let (ranges, after) = rest.split_once(']').unwrap_or((rest, ""));
    let endings = expand(after)?;
    let mut hosts = Vec::new();
    for range in ranges.split(',') {
        for number in numbers(range)? {
            for ending in &endings {
                hosts.push(format!("{before}{number}{ending}"));
            }
            if hosts.len() > MOST_HOSTS {
                return Err(too_many());
            }
        }
    }
    Ok(hosts)
}

/// The numbers of a range such as `08-10`, which are as wide as the first.
fn numbers(range: &str) -> Result<impl Iterator<Item = String>, String> {
    let (low, high) = range.split_once('-').unwrap_or((range, range));
    let width = low.len();
    if width > 20 {
        return Err(format!("the range {range:?} is too wide"));
    }
    let (low, high) = (number(low)?, number(high)?);
    if low > high {
        return Err(format!("the range {range:?} ends before it begins"));
    }
    Ok((low..=high).map(move |number| format!("{number:0width$}")))
}

fn number(text: &str) -> Result<usize, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = is_number.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| format!("{text:?} is no number"))
}

fn too_many() -> String {
    format!("it names more than {MOST_HOSTS} hosts")
}

/// The most hosts in a list, the same as Slurm's own bound.
const MOST_HOSTS: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_listed_as_slurm_expands_them() {
        for (list, expected) in [
            ("tux", &["tux"][..]),
            ("tux[1-2]", &["tux1", "tux2"]),
            ("node[008-010]", &["node008", "node009", "node010"]),
            ("n[9-011]", &["n9", "n10", "n11"]),
            ("a[1-2]b[3-4]", &["a1b3", "a1b4", "a2b3", "a2b4"]),
            ("n[01,03]-ib", &["n01-ib", "n03-ib"]),
            ("b,a,b", &["b", "a", "b"]),
            ("b a\n\tc", &["b", "a", "c"]),
            ("login,n[2,1]", &["login", "n2", "n1"]),
        ] {
            assert_eq!(hosts(list).unwrap(), expected, "{list}");
        }
    }

    #[test]
    fn host_lists_that_are_wrong_are_errors() {
        for list in [
            "",
            ",",
            "n[3-1]",
            "n[1-2",
            "n1-2]",
            "n[1x3]",
            "n[5-]",
            "n[-5]",
            "n[]",
            "n[1,]",
            "n[[1]]",
            "n[1-70000]",
            "n[1-300]m[1-300]",
            "n[99999999999999999999]",
        ] {
            assert!(hosts(list).is_err(), "{list:?}");
        }
        assert_eq!(hosts("n[1-65536]").unwrap().len(), 65_536);
    }

    #[test]
    fn tasks_are_counted_node_by_node() {
        for (list, expected) in [
            ("4", &[4][..]),
            ("2(x3),1", &[2, 2, 2, 1]),
            ("1,2,1(x3),3,2", &[1, 2, 1, 1, 1, 3, 2]),
        ] {
            assert_eq!(tasks_per_node(list).unwrap(), expected, "{list}");
        }
        for list in ["", "2(x", "2(x)", "2(3)", "x", "1,,2", "2(x99999999)", "-1"] {
            assert!(tasks_per_node(list).is_err(), "{list:?}");
        }
    }
}
