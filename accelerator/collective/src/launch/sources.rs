//! The launchers whose variables tell a process its place, in the order in which they are asked.
//!
//! The first launcher that gives a place gives all of it: a rank from one and a world size from another would describe
//! no real job. A launcher that sets rank, size and the two local variables is a [`PlaceVariables`] and one entry of
//! [`SOURCES`]; its function adds where the ranks meet. MPI launchers are Open MPI and those that speak PMI or PMIx.

use std::ffi::OsString;

use accelerator_host as env;

use super::exchange::Wire;
use super::place::{DerivedStore, HostPlace, MeetingPlace, Place, PlaceVariables, derived_port};
use super::reader::{LaunchReader, LaunchSource};
use super::slurm;
use crate::error::{Error, Result};

/// The place that the variables of all launchers tell.
pub(super) struct Found {
    pub(super) place: Option<Place>,
    /// Launchers that have left variables, and did not tell the place.
    pub(super) noticed: Vec<LaunchSource>,
}

struct Source {
    launcher: &'static str,
    /// Any of these variables shows that it was there.
    shown_by: &'static [&'static str],
    /// The place that it tells; an error if it has started several processes and tells this one no place.
    place: fn(LaunchReader<'_>) -> Result<Option<Place>>,
}

/// The launchers whose variables are read after those of [`DIRECT`]. A launcher that runs inside another one comes before
/// it: `mpirun` in a Slurm job starts its daemons as tasks of a step, and its processes inherit the variables of the step.
const SOURCES: [Source; 5] = [
    Source {
        launcher: "Open MPI",
        shown_by: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        place: open_mpi,
    },
    Source {
        launcher: "PMI",
        shown_by: &["PMI_RANK", "PMI_SIZE", "PMI_ID"],
        place: pmi,
    },
    Source {
        launcher: slurm::STEP.launcher,
        shown_by: &["SLURM_PROCID", "SLURM_JOB_ID"],
        place: slurm::task,
    },
    Source {
        launcher: "PMIx",
        // It serves the launchers above, too.
        shown_by: &[],
        place: pmix,
    },
    Source {
        launcher: "torchrun's settings",
        shown_by: &["PET_NNODES", "PET_NPROC_PER_NODE"],
        place: settings_of_torchrun,
    },
];

/// The variables of accel-launch, torchrun, and whoever else sets what torchrun sets.
const DIRECT: PlaceVariables = PlaceVariables {
    launcher: "RANK and WORLD_SIZE",
    rank: "RANK",
    world_size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_world_size: "LOCAL_WORLD_SIZE",
};

/// Asks all launchers in turn.
///
/// # Errors
///
/// A topology error if what one says is incomplete, malformed or contradictory, or if there are other processes
/// of the same job, but this one has no place among them.
pub(super) fn find(vars: LaunchReader<'_>) -> Result<Found> {
    let mut place = direct(vars)?;
    for source in &SOURCES {
        if place.is_none() {
            place = (source.place)(vars)?;
        }
    }
    if place.is_none() {
        slurm::outside(vars)?;
    }
    let winner = place.as_ref().map(|place| place.source.launcher);
    let noticed = SOURCES
        .iter()
        .filter(|source| winner != Some(source.launcher));
    let noticed = noticed.filter_map(|source| {
        let variable = source.shown_by.iter().find(|name| vars.is_set(name))?;
        Some(LaunchSource {
            launcher: source.launcher,
            variable,
        })
    });
    Ok(Found {
        noticed: noticed.collect(),
        place,
    })
}

/// Refuses a process that another launcher has started with others, unless RANK gives it a place.
///
/// # Errors
///
/// A topology error that names the launcher, its variables and what to do.
pub(super) fn check_alone(vars: LaunchReader<'_>) -> Result<()> {
    if [DIRECT.rank, DIRECT.world_size]
        .iter()
        .any(|name| vars.is_set(name))
    {
        return Ok(());
    }
    for source in &SOURCES {
        let Some(place) = (source.place)(vars)? else {
            continue;
        };
        let names = [place.names.rank, place.names.world_size];
        return match place.world_size {
            1 => Ok(()),
            _ => Err(Error::topology(format!(
                "{} has started this process as one of several ({})",
                source.launcher,
                vars.shown(&names)
            ))),
        };
    }
    Ok(())
}

fn direct(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    let Some(mut place) = DIRECT.place(vars, |_| {
        Ok(MeetingPlace::Unknown(
            "WORLD_SIZE is above 1, but MASTER_ADDR is not set; ".to_owned(),
        ))
    })?
    else {
        return Ok(None);
    };
    let is_ours = ["ACCEL_SET_BY_LAUNCHER", "ACCEL_STORE"]
        .iter()
        .any(|name| vars.is_set(name));
    if is_ours {
        place.source.launcher = "accel-launch";
    } else if vars.is_set("TORCHELASTIC_RUN_ID") {
        place.source.launcher = "torchrun";
    } else {
        check_contradiction(vars, place.rank, place.world_size)?;
        if matches!(place.local, HostPlace::Unknown) {
            place.local = local_in_pod(vars, &place)?;
        }
    }
    Ok(Some(place))
}

/// The place on the host of a process that an operator of Kubernetes has started: there `RANK` counts pods.
///
/// # Errors
///
/// A topology error if the operator expects an agent that starts several processes in the pod.
fn local_in_pod(vars: LaunchReader<'_>, place: &Place) -> Result<HostPlace> {
    let processes = vars
        .text("PET_NPROC_PER_NODE")
        .and_then(|text| text.trim().parse().ok());
    if processes.is_some_and(|processes: usize| processes > 1) {
        return Err(Error::topology(format!(
            "{} are set, but LOCAL_RANK is not: RANK counts pods, in each of which an agent is to start several \
             processes; start the program with `accel-launch`, which reads these variables",
            vars.shown(&["RANK", "WORLD_SIZE", "PET_NPROC_PER_NODE"])
        )));
    }
    let pods = vars
        .text("PET_NNODES")
        .and_then(|text| text.trim().parse().ok());
    Ok(match pods == Some(place.world_size) {
        true => HostPlace::RankAndSize(0, 1),
        false => HostPlace::Unknown,
    })
}

/// Refuses a process for which torchrun was set up, but that is none of torchrun's.
fn settings_of_torchrun(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    const COUNTS: [&str; 2] = ["PET_NNODES", "PET_NPROC_PER_NODE"];
    // Words such as `auto` stand for the number of devices.
    let most =
        |name: &&str| -> Option<usize> { vars.text(name)?.rsplit(':').next()?.trim().parse().ok() };
    match COUNTS
        .iter()
        .any(|name| most(name).is_some_and(|most| most > 1))
    {
        true => Err(Error::topology(format!(
            "this process belongs to a job of several ({}), but neither RANK nor WORLD_SIZE is set, so it would \
             train alone: those are the settings of an agent; start the program with `accel-launch`, which reads \
             them, or with torchrun; for a single process, set RANK=0 and WORLD_SIZE=1",
            vars.shown(&["PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"])
        ))),
        false => Ok(None),
    }
}

/// The variables of this environment by which a launcher has told this process its place. A process that it starts, and
/// that is no rank of the same job, must not inherit them.
///
/// ```
/// let mut alone = std::process::Command::new("./train");
/// for name in accelerator_collective::internal::place_variables() {
///     alone.env_remove(name);
/// }
/// ```
pub fn place_variables() -> impl Iterator<Item = OsString> {
    let listed = env::variable(env::SET_BY_LAUNCHER.name).unwrap_or_default();
    let listed = listed.to_string_lossy().into_owned();
    std::env::vars_os()
        .map(|(name, _)| name)
        .filter(move |name| {
            let name = name.to_string_lossy();
            EXACT.contains(&&*name)
                || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                || listed.split(',').any(|set| set.trim() == name)
        })
}

const PREFIXES: [&str; 4] = ["OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_"];

const EXACT: [&str; 14] = [
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "RANK",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "WORLD_SIZE",
    env::SET_BY_LAUNCHER.name,
];

const OPEN_MPI: PlaceVariables = PlaceVariables {
    launcher: "Open MPI",
    rank: "OMPI_COMM_WORLD_RANK",
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
};

/// The variables of MPICH, Intel MPI and other launchers that are built on Hydra, and of `srun --mpi=pmi2`.
const PMI: PlaceVariables = PlaceVariables {
    launcher: "PMI",
    rank: "PMI_RANK",
    world_size: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_world_size: "MPI_LOCALNRANKS",
};

fn open_mpi(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    // Any of its other variables may be a setting of the user's.
    OPEN_MPI.place(vars, |place| {
        if let Some(store) = store_of_one_host(vars, place) {
            return Ok(MeetingPlace::Store(store));
        }
        let namespace = vars.text("PMIX_NAMESPACE");
        Ok(match namespace {
            Some(namespace) => MeetingPlace::Exchanged(Wire::Pmix {
                namespace,
                is_old: vars
                    .text("PMIX_VERSION")
                    .is_some_and(|version| version.starts_with("1.")),
            }),
            None => MeetingPlace::Unknown(format!(
                "{}, but PMIX_NAMESPACE is not set, so the ranks cannot ask `mpirun` where they meet; ",
                vars.shown(&[OPEN_MPI.rank, OPEN_MPI.world_size])
            )),
        })
    })
}

fn pmi(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    if !vars.is_set(PMI.rank) && !vars.is_set(PMI.world_size) {
        // Hydra tells the local rank of every process; the rank, with a port, only to those who ask.
        return match vars.is_set("PMI_ID") || vars.is_set("PMI_PORT") {
            true => Err(Error::topology(format!(
                "{} is set, but neither {} nor {}: the launcher tells them over a connection, which \
                 `Launch::from_env` opens where PMI_PORT and PMI_ID are set",
                vars.shown(&["PMI_PORT", "PMI_ID"]),
                PMI.rank,
                PMI.world_size
            ))),
            false => Ok(None),
        };
    }
    PMI.place(vars, |_| {
        let wire = match (vars.number("PMI_FD")?, pmi_port(vars)?) {
            (Some(descriptor), _) => Wire::PmiDescriptor(descriptor),
            (None, Some((address, id))) => Wire::PmiPort { address, id },
            (None, None) => {
                return Ok(MeetingPlace::Unknown(format!(
                    "{}, but neither PMI_FD nor PMI_PORT is set, so the ranks cannot ask their launcher where \
                     they meet; ",
                    vars.shown(&[PMI.rank, PMI.world_size])
                )));
            }
        };
        Ok(MeetingPlace::Exchanged(wire))
    })
}

/// Returns the address of the PMI server and this process's id there; `None` if
/// other variables give the place, or none names such a server.
pub(super) fn pmi_to_ask(vars: LaunchReader<'_>) -> Result<Option<(String, usize)>> {
    let told = [
        "RANK",
        "WORLD_SIZE",
        OPEN_MPI.rank,
        OPEN_MPI.world_size,
        PMI.rank,
        PMI.world_size,
    ];
    match told.iter().any(|name| vars.is_set(name)) {
        true => Ok(None),
        false => pmi_port(vars),
    }
}

/// Refuses a process if PMIx's variables give only its rank.
pub(super) fn pmix(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    match vars.is_set("PMIX_RANK") {
        true => Err(Error::topology(format!(
            "{} is set, but nothing tells how many processes the job has, so this one would train alone; set \
             RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process, or start it with `mpirun`, \
             `srun` or `accel-launch`; for a single process, set RANK=0 and WORLD_SIZE=1",
            vars.shown(&["PMIX_NAMESPACE", "PMIX_RANK"])
        ))),
        false => Ok(None),
    }
}

/// Refuses the place `rank` of `world_size`, which a bare RANK tells, if MPI tells another.
///
/// # Errors
///
/// A topology error that names both.
fn check_contradiction(vars: LaunchReader<'_>, rank: usize, world_size: usize) -> Result<()> {
    for names in [&OPEN_MPI, &PMI] {
        let [rank_name, size_name] = [names.rank, names.world_size];
        let (Some(other), Some(size)) = (vars.number(rank_name)?, vars.number(size_name)?) else {
            continue;
        };
        if (other, size) != (rank, world_size) {
            return Err(Error::topology(format!(
                "RANK is {rank} and WORLD_SIZE is {world_size}, but {rank_name} is {other} and {size_name} is \
                 {size}; unset RANK and WORLD_SIZE to take the place that {} tells, or {rank_name} and \
                 {size_name} to take the other",
                names.launcher
            )));
        }
    }
    Ok(())
}

/// The store of a job whose ranks are on one host: on the loopback interface, at a port that follows from what names
/// the job to all ranks.
fn store_of_one_host(vars: LaunchReader<'_>, place: &Place) -> Option<DerivedStore> {
    // The last is of Open MPI 4, and the only one that differs between two `mpirun` of one process id.
    const NAMES: [&str; 3] = [
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_hnp_uri",
    ];
    if !place.is_on_one_host() {
        return None;
    }
    let named: Vec<String> = NAMES.iter().filter_map(|name| vars.text(name)).collect();
    let job = named.first()?;
    let hash = blake3::hash(named.join("\n").as_bytes());
    let [a, b, c, d, ..] = *hash.as_bytes();
    Some(DerivedStore {
        host: "127.0.0.1".to_owned(),
        port: derived_port(u32::from_le_bytes([a, b, c, d]).into()),
        job: format!("ompi-{job}"),
    })
}

fn pmi_port(vars: LaunchReader<'_>) -> Result<Option<(String, usize)>> {
    let Some(address) = vars.text("PMI_PORT") else {
        return Ok(None);
    };
    Ok(vars.number("PMI_ID")?.map(|id| (address, id)))
}
