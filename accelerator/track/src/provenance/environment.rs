//! Which environment variables are recorded.

use std::collections::BTreeMap;
use std::ffi::OsString;

use accelerator_env::{LAUNCH_COMMAND, PREFIX, RUN_TAGS, Reader, SET_BY_LAUNCHER, find};

use super::mask::{is_secret_variable, mask_arguments, mask_text};

/// What a recorded variable is to a run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Meaning {
    /// A user sets it, and another run may be given the same.
    Input,
    /// A launcher or a scheduler tells by it where this process stands.
    Place,
}

impl Meaning {
    /// Of a variable; none where it is not recorded.
    pub(super) fn of(name: &str) -> Option<Self> {
        const INPUTS: [&str; 22] = [
            "CARGO_MANIFEST_DIR",
            "CUBLAS_WORKSPACE_CONFIG",
            "CUDA_DEVICE_ORDER",
            "CUDA_VISIBLE_DEVICES",
            "GLIBC_TUNABLES",
            "HIP_VISIBLE_DEVICES",
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "MALLOC_TOP_PAD_",
            "MKL_NUM_THREADS",
            "MLFLOW_EXPERIMENT_ID",
            "MLFLOW_EXPERIMENT_NAME",
            "MLFLOW_TRACKING_URI",
            "NVIDIA_TF32_OVERRIDE",
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "RAYON_NUM_THREADS",
            "ROCR_VISIBLE_DEVICES",
            "RUST_BACKTRACE",
            "RUST_LOG",
            "RUST_MIN_STACK",
            "VK_ICD_FILENAMES",
        ];
        const INPUT_PREFIXES: [&str; 3] = ["CUBECL_", "NCCL_", "WGPU_"];
        const PLACES: [&str; 25] = [
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "LSB_JOBID",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "PBS_JOBID",
            "PMI_RANK",
            "PMI_SIZE",
            "RANK",
            "SLURM_CLUSTER_NAME",
            "SLURM_JOB_ID",
            "SLURM_JOB_NAME",
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_PARTITION",
            "SLURM_LOCALID",
            "SLURM_NNODES",
            "SLURM_NTASKS",
            "SLURM_PROCID",
            "TORCHELASTIC_RUN_ID",
            "WORLD_SIZE",
        ];
        let is_recorded_elsewhere = [LAUNCH_COMMAND.name, RUN_TAGS.name].contains(&name);
        if is_secret_variable(name) || is_recorded_elsewhere {
            return None;
        }
        if name.starts_with(PREFIX) {
            // One that is not known may hold anything.
            return find(name).map(|known| match known.reader {
                Reader::SetByLauncher => Self::Place,
                _ if known.name == accelerator_env::JOB.name => Self::Place,
                _ => Self::Input,
            });
        }
        let is_input =
            INPUTS.contains(&name) || INPUT_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        match (is_input, PLACES.contains(&name)) {
            (true, _) => Some(Self::Input),
            (false, true) => Some(Self::Place),
            (false, false) => None,
        }
    }
}

/// Those variables that are recorded; one without a value is not set.
pub(super) fn recorded(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> BTreeMap<String, String> {
    let text = |(name, value): (OsString, OsString)| {
        let name = name.into_string().ok()?;
        Meaning::of(&name).filter(|_| !value.is_empty())?;
        Some((name, mask_text(&value.to_string_lossy())))
    };
    variables.filter_map(text).collect()
}

/// What `accel-launch` was called with, where it started this process.
pub(super) fn launch_command() -> Vec<String> {
    let text = accelerator_env::variable(LAUNCH_COMMAND.name).unwrap_or_default();
    let words: Option<Vec<String>> = serde_json::from_str(&text.to_string_lossy()).ok();
    mask_arguments(&words.unwrap_or_default())
}

/// The variables that the launcher has set from its own options.
pub(super) fn of_options(environment: &BTreeMap<String, String>) -> impl Iterator<Item = &str> {
    let listed = environment
        .get(SET_BY_LAUNCHER.name)
        .map_or("", String::as_str);
    listed.split(',').map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        recorded(
            pairs
                .iter()
                .map(|(name, value)| (name.into(), value.into())),
        )
    }

    #[test]
    fn what_may_be_a_secret_is_not_recorded() {
        let secrets = [
            "ACCEL_TOKEN_FILE",
            "ACCEL_API_KEY",
            "NCCL_SECRET",
            "NCCL_KEY",
            "WGPU_PASSWORD",
            "CUBECL_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "HF_TOKEN",
            "HOME",
            "SLURM_JWT",
            "ACCEL_FUTURE",
            "PATH",
            "ACCEL_LAUNCH_COMMAND",
        ];
        let secrets = secrets.map(|name| (name, "a secret"));
        assert_eq!(of(&secrets), BTreeMap::new());
    }

    #[test]
    fn what_is_listed_is_recorded_without_passwords() {
        let found = of(&[
            ("RANK", "0"),
            ("ACCEL_OVERLAP", "off"),
            ("NCCL_DEBUG", "INFO"),
            ("RUST_LOG", ""),
            ("MLFLOW_TRACKING_URI", "https://me:hidden@host:5000/a"),
        ]);
        let found: Vec<_> = found
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        assert_eq!(
            found,
            [
                "ACCEL_OVERLAP=off",
                "MLFLOW_TRACKING_URI=https://***@host:5000/a",
                "NCCL_DEBUG=INFO",
                "RANK=0"
            ]
        );
        assert_eq!(Meaning::of("RANK"), Some(Meaning::Place));
        assert_eq!(Meaning::of("ACCEL_PORT"), Some(Meaning::Place));
        assert_eq!(Meaning::of("ACCEL_OVERLAP"), Some(Meaning::Input));
    }
}
