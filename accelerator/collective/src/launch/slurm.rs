//! Slurm's variables: those of a task of a step, and those of a job outside of its steps.

use super::{
    hostlist,
    place::{DerivedStore, LocalTold, MeetingTold, Place, PlaceVariables, derived_port},
    reader::{LaunchReader, invalid},
    setting::LaunchSource,
};
use crate::error::Result;

/// A task of a step. Variables of the job, such as `SLURM_NTASKS`, say nothing about it.
pub(super) const STEP: PlaceVariables = PlaceVariables {
    launcher: "Slurm",
    rank: "SLURM_PROCID",
    world_size: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_world_size: TASKS_PER_NODE,
};

/// The place of a process in its step; `None` for one that is no task of a step.
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
            1 => LocalTold::Place(0, 1),
            _ => LocalTold::Place(step.local_task, step.tasks_per_node[step.node]),
        },
        names: &STEP,
        meeting: step.meeting(vars),
    };
    place.check()?;
    Ok(Some(place))
}

/// Refuses a process of a job with several tasks or hosts that is no task of a step: the body of a batch script, or a
/// shell of `salloc`.
///
/// # Errors
///
/// A topology error that names the variables and what to do.
pub(super) fn outside(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    const COUNTS: [&str; 3] = ["SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"];
    for name in COUNTS {
        if vars.number(name)?.is_some_and(|count| count > 1) {
            return Err(invalid(format!(
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
    /// The index of its host.
    pub(super) node: usize,
    pub(super) hosts: Vec<String>,
    pub(super) tasks_per_node: Vec<usize>,
}

impl SlurmStep {
    /// The task that this process is; `None` for one that is no task of a step.
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
        found.hosts = list(vars, NODES, hostlist::hosts)?;
        found.tasks_per_node = list(vars, TASKS_PER_NODE, hostlist::tasks_per_node)?;
        found.check(vars)?;
        Ok(Some(found))
    }

    /// The host of rank 0.
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

    /// The name of the job: no two steps have the same.
    pub(super) fn name(&self) -> String {
        format!("slurm-{}.{}", self.job, self.step)
    }

    fn meeting(&self, vars: LaunchReader<'_>) -> MeetingTold {
        if is_arbitrary(vars) && self.hosts.len() > 1 {
            return MeetingTold::Nowhere(format!(
                "with {} rank 0 may be on any host of {NODES}; start the step with `srun --mpi=pmi2`, by which \
                 rank 0 tells its address, or ",
                vars.shown(&[DISTRIBUTION])
            ));
        }
        MeetingTold::Store(DerivedStore {
            host: self.head().to_owned(),
            port: self.port(),
            job: self.name(),
        })
    }

    fn check(&self, vars: LaunchReader<'_>) -> Result<()> {
        let shown = |names: &[&str]| vars.shown(names);
        let (hosts, counts) = (self.hosts.len(), self.tasks_per_node.len());
        if hosts != counts {
            return Err(invalid(format!(
                "{NODES} has {hosts} hosts, but {TASKS_PER_NODE} counts the tasks of {counts} ({})",
                shown(&[NODES, TASKS_PER_NODE])
            )));
        }
        let sum: usize = self.tasks_per_node.iter().sum();
        if sum != self.tasks {
            return Err(invalid(format!(
                "{} is {}, but {TASKS_PER_NODE} counts {sum} ({})",
                STEP.world_size,
                self.tasks,
                shown(&[TASKS_PER_NODE])
            )));
        }
        if self.node >= hosts {
            return Err(invalid(format!(
                "{NODE} is {}, but {NODES} has {hosts} hosts ({})",
                self.node,
                shown(&[NODES])
            )));
        }
        match self.task == 0 && self.node != 0 && !is_arbitrary(vars) {
            true => Err(invalid(format!(
                "{} is 0, but {NODE} is {}: rank 0 is on the first host of {NODES}",
                STEP.rank, self.node
            ))),
            false => Ok(()),
        }
    }
}

/// Tasks are placed by a list of the user's.
fn is_arbitrary(vars: LaunchReader<'_>) -> bool {
    vars.text(DISTRIBUTION)
        .is_some_and(|how| how.starts_with("arbitrary"))
}

/// The number of the step, if the variables are those of one that `srun` has started.
fn step_id(vars: LaunchReader<'_>) -> Option<u64> {
    /// Numbers from here on are the batch script, the shell of `salloc` and the like; so are negative ones.
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
        return Err(invalid(format!(
            "{name} is not set, beside {}",
            vars.shown(&TASK)
        )));
    };
    read(&text).map_err(|why| invalid(format!("{name} is {text:?}: {why}")))
}

/// The variables that every task has.
const TASK: [&str; 2] = [STEP.rank, STEP.world_size];
const STEP_ID: &str = "SLURM_STEP_ID";
const NODE: &str = "SLURM_NODEID";
const NODES: &str = "SLURM_STEP_NODELIST";
const TASKS_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";
const DISTRIBUTION: &str = "SLURM_DISTRIBUTION";
