//! The variables of MPI's launchers: Open MPI, and those that speak PMI or PMIx.

use super::{
    exchange::Wire,
    place::{DerivedStore, MeetingTold, Place, PlaceVariables, derived_port},
    reader::{LaunchReader, invalid},
};
use crate::error::Result;

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

/// The place of a process of Open MPI's `mpirun`.
pub(super) fn open_mpi(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    // Any of its other variables may be a setting of the user's.
    OPEN_MPI.place(vars, |place| {
        if let Some(store) = store_of_one_host(vars, place) {
            return Ok(MeetingTold::Store(store));
        }
        let namespace = vars.text("PMIX_NAMESPACE");
        Ok(match namespace {
            Some(namespace) => MeetingTold::Exchanged(Wire::Pmix {
                namespace,
                is_old: vars
                    .text("PMIX_VERSION")
                    .is_some_and(|version| version.starts_with("1.")),
            }),
            None => MeetingTold::Nowhere(format!(
                "{}, but PMIX_NAMESPACE is not set, so the ranks cannot ask `mpirun` where they meet; ",
                vars.shown(&[OPEN_MPI.rank, OPEN_MPI.world_size])
            )),
        })
    })
}

/// The place of a process of a launcher that speaks PMI.
pub(super) fn pmi(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    if !vars.is_set(PMI.rank) && !vars.is_set(PMI.world_size) {
        // Hydra tells the local rank of every process; the rank, with a port, only to those who ask.
        return match vars.is_set("PMI_ID") || vars.is_set("PMI_PORT") {
            true => Err(invalid(format!(
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
                return Ok(MeetingTold::Nowhere(format!(
                    "{}, but neither PMI_FD nor PMI_PORT is set, so the ranks cannot ask their launcher where \
                     they meet; ",
                    vars.shown(&[PMI.rank, PMI.world_size])
                )));
            }
        };
        Ok(MeetingTold::Exchanged(wire))
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

/// Refuses a process of which PMIx's variables tell no more than its rank.
pub(super) fn pmix(vars: LaunchReader<'_>) -> Result<Option<Place>> {
    match vars.is_set("PMIX_RANK") {
        true => Err(invalid(format!(
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
pub(super) fn check_contradiction(
    vars: LaunchReader<'_>,
    rank: usize,
    world_size: usize,
) -> Result<()> {
    for names in [&OPEN_MPI, &PMI] {
        let [rank_name, size_name] = [names.rank, names.world_size];
        let (Some(other), Some(size)) = (vars.number(rank_name)?, vars.number(size_name)?) else {
            continue;
        };
        if (other, size) != (rank, world_size) {
            return Err(invalid(format!(
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
