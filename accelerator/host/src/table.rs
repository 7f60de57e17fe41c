//! The table, in alphabetical order: a new variable is one entry.

use crate::variable::Grammar::{
    Count, ExistingFile, NewFile, Number, OneOf, Port, Seconds, Switch, Text, TraceSchedule,
};
use crate::variable::Reader::{LauncherAndRanks, Ranks, SetByLauncher, Tests};
use crate::variable::Variable;

macro_rules! variables {
    ($($name:ident, $reader:expr, $grammar:expr, default $default:literal, code $code:literal: $meaning:literal;)*) => {
        $(
            #[doc = concat!("`ACCEL_", stringify!($name), "`: ", $meaning, ".")]
            pub const $name: Variable = Variable {
                name: concat!("ACCEL_", stringify!($name)),
                meaning: $meaning,
                grammar: $grammar,
                default: $default,
                code: $code,
                reader: $reader,
            };
        )*

        /// All variables, in alphabetical order.
        pub const VARIABLES: &[Variable] = &[$($name),*];
    };
}

variables! {
    ACCUMULATION_STEPS, Ranks, Count, default "1", code "accumulation_steps":
        "micro-batches per optimizer step";
    COMPRESSION, Ranks, OneOf(&["none", "f16", "bf16"]), default "none", code "compression":
        "the type in which gradients are sent";
    DEVICE, Ranks, OneOf(&["cuda", "rocm", "metal", "vulkan", "wgpu", "flex", "cpu", "ndarray"]), default "the fastest that the program is built with", code "device":
        "the device of each rank";
    ELASTIC, SetByLauncher, OneOf(&["running", "joining"]), default "none", code "":
        "set where the number of ranks may change; joining: the others run already";
    FAULTS, Ranks, Text("a plan of faults, for programs that are built with them"), default "none", code "":
        "faults to inject in tests";
    FIXTURES, Tests, Text("a folder"), default "the fixtures of this project", code "":
        "the fixtures of this project's tests";
    INSECURE, LauncherAndRanks, Switch, default "0", code "":
        "whether several hosts may connect without a token";
    JOB, LauncherAndRanks, Text("a name"), default "a new one for every launch", code "":
        "the name of the job; ranks of another job are refused";
    LAUNCH_COMMAND, SetByLauncher, Text("a JSON array of words"), default "none", code "":
        "what the launcher was called with, without secrets";
    LAUNCH_ID, SetByLauncher, Text("an identity"), default "a new one for every launch", code "":
        "the launch that a rank belongs to, the same for all restarts; a run that is restarted without a checkpoint starts over";
    LIVENESS_TIMEOUT, LauncherAndRanks, Seconds, default "5", code "liveness_timeout":
        "after how much silence a rank or a host is considered lost";
    LOCAL_POOL, Ranks, Switch, default "1", code "":
        "whether the thread that builds the accelerator joins a rayon pool of its own (Flex backend, more than one thread)";
    MAX_RESTARTS, SetByLauncher, Number, default "--max-restarts", code "":
        "how often the launcher restarts the job at most";
    NETWORK_INTERFACE, Ranks, Text("the name of an interface, or several with commas, of which the first that the host has counts"), default "where the way to the store begins", code "":
        "the network interface at whose address a rank listens for the others";
    OFFLOAD_FOLDER, Ranks, Text("a folder on a local disk"), default "none: everything stays in memory", code "offload_folder":
        "the folder for memory-mapped files with the parameters, gradients and optimizer state of sharded units";
    ON_LOSS, SetByLauncher, OneOf(&["continue", "survivor"]), default "none", code "":
        "set if ranks may continue after the loss of another; survivor: this rank does so";
    OPERATIONS, Ranks, OneOf(&["keep", "recompute"]), default "keep", code "operations":
        "how single operations handle values that they need in backward; recompute: those of cheap ones are recomputed";
    OVERLAP, Ranks, OneOf(&["auto", "on", "off"]), default "auto", code "overlap":
        "whether gradients are sent during backward; auto: between hosts, and on CUDA devices";
    OVERSUBSCRIBE_GPUS, LauncherAndRanks, Switch, default "0", code "oversubscription":
        "whether more ranks than GPUs may share them";
    PORT, SetByLauncher, Port, default "--master-port", code "":
        "the port of the store";
    PRECISION, Ranks, OneOf(&["no", "f16", "bf16"]), default "no", code "precision":
        "the type in which `forward` computes";
    REDUCTION, Ranks, OneOf(&["auto", "nccl", "staged"]), default "auto: NCCL where every rank has a CUDA device of its own", code "gradient_reduction":
        "how gradients of GPUs are reduced: by NCCL, or through host memory";
    RESTART, SetByLauncher, Number, default "0", code "":
        "how often the job has been restarted";
    RUN_TAGS, Ranks, Text("key=value, with commas between several"), default "none", code "tag":
        "tags of the run that the program starts";
    SET_BY_LAUNCHER, SetByLauncher, Text("names of variables, separated by commas"), default "none", code "":
        "the variables that the launcher has set; a program that does not know one of them ignores it";
    STARTED_BY, SetByLauncher, Number, default "none", code "":
        "the descriptor by which a rank that a program has started for itself finds the call that has started it";
    STORE, SetByLauncher, OneOf(&["launcher", "rank0"]), default "rank0", code "":
        "who hosts the store";
    TOKEN_FILE, LauncherAndRanks, ExistingFile, default "none", code "":
        "the file that holds the job token";
    TRACE, Ranks, NewFile, default "none", code "trace":
        "the file to write the trace of all ranks to";
    TRACE_SCHEDULE, Ranks, TraceSchedule, default "none: one trace of everything", code "trace_schedule":
        "which steps are traced, each cycle of them to a file per rank";
    TRANSPORT, Ranks, OneOf(&["auto", "hierarchical", "shm", "tcp", "threads"]), default "auto", code "transport":
        "how ranks exchange data; auto: shm on one host, hierarchical where a host has several ranks, else tcp";
    TRIAL_FOLDER, SetByLauncher, Text("a folder"), default "none", code "":
        "the folder of this process's trial, if a hyperparameter search has started it";
    TUNE_WORKER, SetByLauncher, Number, default "none", code "":
        "the descriptor by which a trial of a hyperparameter search finds the search that has started it";
    UNITS, Ranks, OneOf(&["plain", "keep", "recompute", "shard"]), default "plain", code "units":
        "how units of a model run: recompute recomputes their activations in backward instead of keeping them; shard also shards their parameters over the ranks";
}
