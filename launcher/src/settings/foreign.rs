//! The flags that people know from other launchers: `accelerate launch`, `torchrun`, `mpirun`, `srun` and `deepspeed`.
//!
//! A flag that means the same as one of ours is replaced by it before clap reads the line. Any other is an error that says
//! what to write instead.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// An option, by its long name, that a foreign flag stands for unless the line has one that says more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Implied {
    pub(crate) option: &'static str,
    pub(crate) value: &'static str,
    /// The options beside which it is left out.
    pub(crate) unless: &'static [&'static str],
}

/// The meaning of a foreign flag.
#[derive(Clone, Copy)]
enum Meaning {
    /// The option of ours that takes its value.
    Is(&'static str),
    /// A switch that stands for an option with a value.
    Implies(Implied),
    /// A switch that asks for the default, and is ignored.
    Ignored,
    /// A flag that is ignored if its value is accepted; else the text says what to write instead.
    Value(fn(&str) -> bool, &'static str),
    /// An error, with the text that says what to write instead.
    Instead(&'static str),
}

use Meaning::{Ignored, Implies, Instead, Is, Value};

const ANY: fn(&str) -> bool = |_| true;
const ZERO: &str = "for ZeRO stage 1 write `prepare((model, Sharded(optimizer)))` in the program, and for stage 3 wrap the \
     blocks of the model in `nn::Unit` and write ACCEL_UNITS=shard before accel-launch";
const FSDP: &str =
    "wrap the blocks of the model in `nn::Unit`, and write ACCEL_UNITS=shard before accel-launch";
const PARALLEL: &str = "layers cannot be split across ranks, so leave it out";
const DYNAMO: &str = "kernels are compiled by the backend: build the program with its features `fusion` and `autotune`";
const NO_BACKEND: &str = "there is no backend for it: write --device cuda, rocm, metal, vulkan, wgpu, flex, cpu or ndarray, or leave it out";
const VARIABLES: &str =
    "ranks inherit the environment: write NAME=VALUE before accel-launch on the same line";
const CORES: &str = "ranks are not bound to cores: write --threads-per-process N, or leave it out";
const SHOWN: &str = "output is shown, and with --log-dir DIR also written to a file for each rank";
const CPU: Implied = Implied {
    option: "device",
    value: "flex",
    unless: &["device"],
};

/// The flags, by their names without leading dashes and with `-` for `_`. A name that ends in `*` stands for all names
/// that begin so. Names of one letter have one dash, the others one or two.
const FLAGS: &[(&[&str], Meaning)] = &[
    // Of the number of ranks, and of their place.
    (
        &["np", "nprocs", "num-gpus", "ntasks"],
        Is("--num-processes"),
    ),
    (
        &["nproc", "ppn", "npernode", "ntasks-per-node"],
        Is("--nproc-per-node"),
    ),
    (&["num-nodes", "nodes"], Is("--nnodes")),
    (
        &["N"],
        Instead(
            "it is --nnodes for srun and --nproc-per-node for mpirun: write the one that you mean",
        ),
    ),
    (
        &["gpus"],
        Instead("write --num-processes N, or --nproc-per-node gpu for one process per GPU"),
    ),
    (&["H", "host"], Is("--hosts")),
    (&["machinefile", "hostfile"], Is("--hostfile")),
    (
        &["multi-gpu"],
        Implies(Implied {
            option: "nproc-per-node",
            value: "gpu",
            unless: &["num-processes", "nproc-per-node", "hosts", "hostfile"],
        }),
    ),
    (
        &["standalone"],
        Implies(Implied {
            option: "nnodes",
            value: "1",
            unless: &["nnodes", "hosts", "hostfile"],
        }),
    ),
    (
        &["include", "exclude"],
        Instead("write --gpu-ids 0,2 for GPUs of this host, or --hosts host0:4,host1:4 for hosts"),
    ),
    (
        &["launcher"],
        Instead("write --hosts host0:4,host1:4 to start a launcher on each over SSH"),
    ),
    // Of the rendezvous.
    (
        &["rdzv-backend"],
        Value(
            |backend| ["c10d", "static"].contains(&backend),
            "host 0 serves the rendezvous itself: write --rdzv-endpoint HOST0[:PORT], and leave it out",
        ),
    ),
    (
        &["rdzv-id", "monitor-interval", "start-method", "role"],
        Value(ANY, ""),
    ),
    (
        &["rdzv-conf"],
        Instead("write --join-timeout SECONDS for its timeout"),
    ),
    (&["local-addr"], Instead("write --network-interface NAME")),
    // Of the program.
    (
        &["m", "module"],
        Instead("it runs a Python module: write accel-launch [OPTIONS] python -m MODULE"),
    ),
    (&["no-python", "use-env", "same-network", "debug"], Ignored),
    (
        &["main-training-function"],
        Instead("the program has a `main`, so leave it out"),
    ),
    (&["cpu", "use-cpu"], Implies(CPU)),
    (
        &["mps", "use-mps-device"],
        Instead("write --device wgpu, which computes on Apple's GPUs"),
    ),
    (
        &[
            "tpu", "tpu-*", "xpu", "use-xpu", "ipex", "npu", "hpu", "mlu", "musa", "sdaa",
        ],
        Instead(NO_BACKEND),
    ),
    (
        &["num-cpu-threads-per-process", "cpus-per-task"],
        Is("--threads-per-process"),
    ),
    (&["enable-cpu-affinity", "cpu-bind"], Instead(CORES)),
    (&["downcast-bf16"], Instead("write --mixed-precision bf16")),
    (
        &["fp8-*", "use-fp8"],
        Instead("fp8 is not supported: write --mixed-precision bf16"),
    ),
    (
        &["gradient-clipping"],
        Instead("write `gradients.clip_norm(1.0)` in the program"),
    ),
    (
        &["use-deepspeed", "deepspeed*", "zero*", "offload-*"],
        Instead(ZERO),
    ),
    (
        &[
            "fsdp-activation-checkpointing",
            "gradient-checkpointing",
            "activation-checkpointing",
        ],
        Instead(
            "put the blocks of the model into `nn::Unit`s, and write ACCEL_UNITS=recompute before accel-launch",
        ),
    ),
    (&["use-fsdp", "fsdp-*"], Instead(FSDP)),
    (
        &[
            "use-megatron-lm",
            "megatron-lm-*",
            "use-tp",
            "tp-*",
            "use-parallelism-config",
            "parallelism-config-*",
        ],
        Instead(PARALLEL),
    ),
    (
        &["dynamo-backend"],
        Value(|backend| backend.eq_ignore_ascii_case("no"), DYNAMO),
    ),
    (&["dynamo-*"], Instead(DYNAMO)),
    // Of the environment and the output.
    (&["x"], Value(|variable| !variable.contains('='), VARIABLES)),
    (&["env", "genv", "export"], Instead(VARIABLES)),
    (
        &["wdir", "wd", "chdir"],
        Instead("change the folder first: cd DIR && accel-launch …"),
    ),
    (
        &["bind-to", "map-by", "rank-by"],
        Value(|what| what == "none", CORES),
    ),
    (
        &[
            "allow-run-as-root",
            "oversubscribe",
            "tag-output",
            "l",
            "label",
        ],
        Ignored,
    ),
    (&["mca"], Instead("it is for Open MPI, so leave it out")),
    (
        &[
            "tee",
            "redirects",
            "t",
            "output-filename",
            "logs-specs",
            "local-ranks-filter",
        ],
        Instead(SHOWN),
    ),
];

/// Replaces the flag at `at` by ours if it is a foreign one, and returns `true`; the words at `at` are then others.
///
/// # Errors
/// Returns what to write instead, if the flag has no equivalent.
pub(crate) fn translate(
    words: &mut Vec<OsString>,
    at: usize,
    implied: &mut Vec<Implied>,
) -> Result<bool, String> {
    let Some(word) = words.get(at).map(|word| word.as_bytes().to_vec()) else {
        return Ok(false);
    };
    let end = word.iter().position(|&byte| byte == b'=');
    let (flag, value) = word.split_at(end.unwrap_or(word.len()));
    let flag = String::from_utf8_lossy(flag);
    let Some(meaning) = meaning(&flag) else {
        return Ok(false);
    };
    match meaning {
        // `--hostfile` has that name here too.
        Is(option) if option == flag => return Ok(false),
        Is(option) => {
            let ours = [option.as_bytes(), value].concat();
            words[at] = OsString::from_vec(ours);
        }
        Implies(option) => {
            implied.push(option);
            words.remove(at);
        }
        Ignored => drop(words.remove(at)),
        Value(accepts, instead) => {
            let last = at + usize::from(value.is_empty());
            let given = match value.strip_prefix(b"=") {
                Some(value) => String::from_utf8_lossy(value).into_owned(),
                None => words
                    .get(last)
                    .map_or_else(String::new, |word| word.to_string_lossy().into_owned()),
            };
            if !accepts(&given) {
                return Err(refusal(&format!("{flag} {given}"), instead));
            }
            words.drain(at..words.len().min(last + 1));
        }
        Instead(instead) => return Err(refusal(&flag, instead)),
    }
    Ok(true)
}

/// Returns what to write instead of a key that is a foreign flag's name.
pub(crate) fn instead_of(key: &str) -> Option<String> {
    match meaning(&format!("--{key}"))? {
        Is(option) => Some(format!("write {}", option.trim_start_matches('-'))),
        Implies(ours) => Some(format!("write {} = {:?}", ours.option, ours.value)),
        Ignored | Value(_, "") => Some("leave it out".to_owned()),
        Value(_, instead) | Instead(instead) => Some(instead.to_owned()),
    }
}

fn refusal(flag: &str, instead: &str) -> String {
    format!("{flag} is not an option of accel-launch: {instead}")
}

/// Returns the meaning of a flag such as `-np` or `--multi_gpu`.
fn meaning(flag: &str) -> Option<Meaning> {
    let name = flag.strip_prefix('-')?;
    let (name, dashes) = match name.strip_prefix('-') {
        Some(name) => (name.replace('_', "-"), 2),
        None => (name.to_owned(), 1),
    };
    if name.len() == 1 && dashes == 2 {
        return None;
    }
    let is_it = |known: &&str| match known.strip_suffix('*') {
        Some(beginning) => dashes == 2 && name.starts_with(beginning),
        None => **known == name,
    };
    let found = FLAGS.iter().find(|(names, _)| names.iter().any(is_it));
    found.map(|(_, meaning)| *meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_every_flag() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/launcher-flags.md");
        let text = std::fs::read_to_string(path).unwrap();
        for name in FLAGS.iter().flat_map(|(names, _)| *names) {
            let dashes = if name.len() == 1 { "-" } else { "--" };
            let written = [format!("`{dashes}{name}`"), format!("`{dashes}{name} ")];
            let is_there = written.iter().any(|name| text.contains(name));
            assert!(is_there || text.contains(&format!("`-{name} ")), "{name}");
        }
    }

    #[test]
    fn a_flag_has_one_or_two_dashes_and_dashes_or_underscores() {
        for flag in [
            "-np",
            "--np",
            "--num_gpus",
            "--num-gpus",
            "-x",
            "--fsdp_offload_params",
        ] {
            assert!(meaning(flag).is_some(), "{flag}");
        }
        for flag in [
            "np",
            "--x",
            "-n",
            "-fsdp-x",
            "--num-processes",
            "",
            "-",
            "--",
        ] {
            assert!(meaning(flag).is_none(), "{flag}");
        }
    }
}
