use std::ffi::OsString;

use accelerator_host as env;

/// The variables of this environment by which a launcher has told this process its place. A process that it starts, and
/// that is no rank of the same job, must not inherit them.
///
/// ```
/// let mut alone = std::process::Command::new("./train");
/// for name in accelerator_collective::launcher::place_variables() {
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
