//! The launchers whose variables tell a process its place, and those that are recognised only to refuse them.
//!
//! Another launcher that sets rank, size and the two local variables is one entry of [`SOURCES`]. One that does not say
//! where the ranks meet (Slurm) also needs its own reading of the store's host, in `Reader::rendezvous`.

use super::{Reader, invalid};
use crate::error::Result;

/// Where a process may learn its place from.
pub(super) enum EnvSource {
    /// A launcher whose variables tell each process its place.
    Supported(PlaceVariables),
    /// A launcher that is not supported. Where it has started several processes, each would train alone.
    Refused {
        /// Its name.
        launcher: &'static str,
        /// What shows that there are several.
        evidence: Evidence,
    },
}

/// The variables that tell a process its place.
pub(super) struct PlaceVariables {
    /// Its rank among all processes of the job.
    pub(super) rank: &'static str,
    /// How many processes the job has.
    pub(super) world_size: &'static str,
    /// Its rank among those of its host.
    pub(super) local_rank: &'static str,
    /// How many processes of the job its host has.
    pub(super) local_world_size: &'static str,
}

/// Variables that show that a launcher has started several processes.
pub(super) enum Evidence {
    /// How many it was to start: numbers, or ranges `MIN:MAX`.
    Counts(&'static [&'static str]),
    /// How many it has started, and the rank of this one.
    SizeAndRank(&'static str, &'static str),
    /// The rank of this one; how many there are is not told.
    Rank(&'static str),
}

/// All sources. Supported launchers come first. Of the refused ones, a launcher that runs inside another stands before it.
static SOURCES: [EnvSource; 7] = [
    // accel-launch and torchrun.
    EnvSource::Supported(PlaceVariables {
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
    }),
    // The settings of torchrun in Kubernetes' operators, where torchrun itself was not started.
    EnvSource::Refused {
        launcher: "torchrun",
        evidence: Evidence::Counts(&["PET_NNODES", "PET_NPROC_PER_NODE"]),
    },
    EnvSource::Refused {
        launcher: "Open MPI",
        evidence: Evidence::SizeAndRank("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    },
    EnvSource::Refused {
        launcher: "an MPI launcher (PMI)",
        evidence: Evidence::SizeAndRank("PMI_SIZE", "PMI_RANK"),
    },
    // The body of a batch script is in no step, and so is alone.
    EnvSource::Refused {
        launcher: "Slurm",
        evidence: Evidence::SizeAndRank("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    },
    EnvSource::Refused {
        launcher: "an MPI launcher (PMI)",
        evidence: Evidence::Rank("PMI_ID"),
    },
    EnvSource::Refused {
        launcher: "PMIx",
        evidence: Evidence::Rank("PMIX_RANK"),
    },
];

/// The variables of the launchers that are supported.
pub(super) fn supported() -> impl Iterator<Item = &'static PlaceVariables> {
    SOURCES.iter().filter_map(|source| match source {
        EnvSource::Supported(place) => Some(place),
        EnvSource::Refused { .. } => None,
    })
}

impl<F: Fn(&str) -> Option<String>> Reader<F> {
    /// Refuses to take this process, which was given no place, for a world of one where another launcher
    /// has started several.
    ///
    /// # Errors
    ///
    /// A topology error that names the launcher, its variables and what to do.
    pub(super) fn check_alone(&self) -> Result<()> {
        let Some((launcher, names)) = self.job()? else {
            return Ok(());
        };
        let set = names.iter();
        let set = set.filter_map(|name| Some(format!("{name}={}", self.text(name)?)));
        Err(invalid(format!(
            "this process belongs to a job of {launcher} ({}), but neither RANK nor WORLD_SIZE is set, so it \
             would train alone; start the job with `accel-launch` or torchrun, or set RANK, WORLD_SIZE, \
             LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process; for a single \
             process, set RANK=0 and WORLD_SIZE=1",
            set.collect::<Vec<_>>().join(", ")
        )))
    }

    /// The launcher whose job may have several processes, and the variables that show it.
    fn job(&self) -> Result<Option<(&'static str, Vec<&'static str>)>> {
        for source in &SOURCES {
            let EnvSource::Refused { launcher, evidence } = source else {
                continue;
            };
            match *evidence {
                Evidence::Counts(names) => {
                    // Words such as `auto` stand for the number of devices.
                    let most = |name: &str| -> Option<usize> {
                        self.text(name)?.rsplit(':').next()?.trim().parse().ok()
                    };
                    let several = names
                        .iter()
                        .find(|name| most(name).is_some_and(|most| most > 1));
                    if let Some(name) = several {
                        return Ok(Some((launcher, vec![name])));
                    }
                }
                Evidence::SizeAndRank(size, rank) => {
                    let is_later = self.number(rank)?.is_some_and(|rank| rank > 0);
                    // The first one decides: Open MPI's daemons are a step of Slurm's, whose variables they hand on.
                    match self.number(size)? {
                        Some(given) if given > 1 || is_later => {
                            return Ok(Some((launcher, vec![size, rank])));
                        }
                        Some(1) => return Ok(None),
                        // There is a rank before this one.
                        _ if is_later => return Ok(Some((launcher, vec![rank]))),
                        _ => {}
                    }
                }
                Evidence::Rank(rank) => {
                    if self.text(rank).is_some() {
                        return Ok(Some((launcher, vec![rank])));
                    }
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use crate::launch::Launch;

    fn launch(text: &str) -> crate::error::Result<Launch> {
        let vars: Vec<_> = text
            .split_whitespace()
            .map(|x| x.split_once('=').unwrap())
            .collect();
        Launch::from_vars(|name| {
            let found = vars.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    /// It is refused, and the error names the launcher, these variables and what to do.
    fn is_refused(text: &str, launcher: &str, named: &[&str]) {
        let error = launch(text).expect_err(text);
        assert!(error.is_topology(), "{text}: {error}");
        let message = error.to_string();
        let what_to_do = [
            "neither RANK nor WORLD_SIZE",
            "accel-launch",
            "RANK=0 and WORLD_SIZE=1",
        ];
        for part in [launcher].iter().chain(named).chain(&what_to_do) {
            assert!(message.contains(part), "{part:?}: {message}");
        }
    }

    fn is_alone(text: &str) {
        let launch = launch(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(launch.topology.to_string(), "rank 0 of 1 (local 0 of 1)");
    }

    #[test]
    fn a_rank_of_open_mpi_is_no_world_of_one() {
        let place = "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        for (variables, named) in [
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
                "OMPI_COMM_WORLD_RANK=1",
            ),
            // Open MPI 5 runs on PMIx.
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=prte PMIX_RANK=0",
                "OMPI_COMM_WORLD_RANK=0",
            ),
        ] {
            let text = format!("{variables} {place}");
            is_refused(&text, "Open MPI", &["OMPI_COMM_WORLD_SIZE=2", named]);
        }
        is_alone("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_NAMESPACE=prte PMIX_RANK=0");
    }

    #[test]
    fn a_rank_of_pmi_is_no_world_of_one() {
        let hydra = "PMI_RANK=1 PMI_SIZE=4 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
        is_refused(hydra, "PMI", &["PMI_SIZE=4", "PMI_RANK=1"]);
        is_alone("PMI_RANK=0 PMI_SIZE=1 PMI_FD=6 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1");
        // A rank above 0 shows that there are others.
        is_refused("PMI_RANK=1", "PMI", &["PMI_RANK=1"]);
        is_refused("PMI_RANK=1 PMI_SIZE=0", "PMI", &["PMI_RANK=1"]);
        // With a port instead of a socket nothing tells how many there are.
        is_refused("PMI_PORT=n0:4567 PMI_ID=0", "PMI", &["PMI_ID=0"]);
    }

    #[test]
    fn a_rank_of_pmix_is_no_world_of_one() {
        is_refused("PMIX_NAMESPACE=job-7 PMIX_RANK=0", "PMIx", &["PMIX_RANK=0"]);
    }

    #[test]
    fn a_task_of_a_slurm_step_is_no_world_of_one() {
        let step = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2";
        let named = ["SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID=1"];
        is_refused(&format!("{step} SLURM_PROCID=1"), "Slurm", &named);
        let pmix = format!("{step} SLURM_PROCID=1 PMIX_NAMESPACE=slurm.7.0 PMIX_RANK=1");
        is_refused(&pmix, "Slurm", &named);
    }

    #[test]
    fn what_runs_once_in_slurm_is_alone() {
        // The body of a batch script, which belongs to no step.
        is_alone("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_NNODES=2");
        let one = "SLURM_JOB_ID=7 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0";
        is_alone(one);
        is_alone(&format!("{one} PMIX_NAMESPACE=slurm.7.3 PMIX_RANK=0"));
        // The shell of `salloc`, in a step of its own within a job of four tasks.
        is_alone(
            "SLURM_JOB_ID=7 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4 \
             SLURM_PROCID=0",
        );
        // Open MPI's daemons are a step of Slurm's, whose variables its processes inherit.
        is_alone(
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_JOB_ID=7 SLURM_STEP_ID=0 \
             SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1",
        );
    }

    #[test]
    fn what_torchrun_was_to_start_is_no_world_of_one() {
        for (text, named) in [
            (
                "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=auto",
                "PET_NNODES=2",
            ),
            (
                "PET_NNODES=1:4 PET_RDZV_ENDPOINT=worker-0:23456",
                "PET_NNODES=1:4",
            ),
            ("PET_NNODES=1 PET_NPROC_PER_NODE=8", "PET_NPROC_PER_NODE=8"),
        ] {
            is_refused(text, "torchrun", &[named]);
        }
        is_alone("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1 PET_STANDALONE=");
        is_alone("PET_NNODES=1:1 PET_NPROC_PER_NODE=auto");
    }

    #[test]
    fn a_place_that_was_given_stands_above_other_launchers() {
        let others = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 PMI_SIZE=2 PMI_ID=0 \
                      PMIX_RANK=0 SLURM_STEP_NUM_TASKS=2 PET_NNODES=2";
        let place = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 \
                     MASTER_PORT=29500";
        let launch = launch(&format!("{others} {place}")).unwrap();
        assert_eq!(launch.topology.to_string(), "rank 5 of 8 (local 1 of 4)");
        is_alone(&format!("{others} RANK=0 WORLD_SIZE=1"));
    }

    #[test]
    fn a_size_that_is_no_number_is_named() {
        let error = launch("OMPI_COMM_WORLD_SIZE=two").unwrap_err().to_string();
        assert!(
            error.starts_with("OMPI_COMM_WORLD_SIZE is \"two\""),
            "{error}"
        );
    }
}
