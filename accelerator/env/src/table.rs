//! The table, in alphabetical order.

use crate::grammar::Grammar;
use crate::variable::{Reader, Variable};

/// All variables, in alphabetical order.
pub const VARIABLES: [Variable; 21] = [
    ACCUMULATION_STEPS,
    COMPRESSION,
    DEVICE,
    FAULTS,
    FIXTURES,
    INSECURE,
    JOB,
    LIVENESS_TIMEOUT,
    MAX_RESTARTS,
    OVERLAP,
    OVERSUBSCRIBE_GPUS,
    PORT,
    PRECISION,
    REDUCTION,
    RESTART,
    SET_BY_LAUNCHER,
    STORE,
    TOKEN_FILE,
    TRACE,
    TRACE_SCHEDULE,
    TRANSPORT,
];

/// `ACCEL_ACCUMULATION_STEPS`: micro-batches per optimizer step.
pub const ACCUMULATION_STEPS: Variable = Variable {
    name: "ACCEL_ACCUMULATION_STEPS",
    meaning: "micro-batches per optimizer step",
    grammar: Grammar::Count,
    default: "1",
    code: "accumulation_steps",
    reader: Reader::Ranks,
};

/// `ACCEL_COMPRESSION`: in which type gradients are sent.
pub const COMPRESSION: Variable = Variable {
    name: "ACCEL_COMPRESSION",
    meaning: "in which type gradients are sent",
    grammar: Grammar::OneOf(&["none", "f16", "bf16"]),
    default: "none",
    code: "with_compression",
    reader: Reader::Ranks,
};

/// `ACCEL_DEVICE`: the device of each rank.
pub const DEVICE: Variable = Variable {
    name: "ACCEL_DEVICE",
    meaning: "the device of each rank",
    grammar: Grammar::OneOf(&["cuda", "wgpu", "flex", "ndarray"]),
    default: "the fastest that the program is built with",
    code: "device",
    reader: Reader::Ranks,
};

/// `ACCEL_FAULTS`: faults to inject in tests.
pub const FAULTS: Variable = Variable {
    name: "ACCEL_FAULTS",
    meaning: "faults to inject in tests",
    grammar: Grammar::Text("a plan of faults, for programs that are built with them"),
    default: "none",
    code: "",
    reader: Reader::Ranks,
};

/// `ACCEL_FIXTURES`: the fixtures of this project's tests.
pub const FIXTURES: Variable = Variable {
    name: "ACCEL_FIXTURES",
    meaning: "the fixtures of this project's tests",
    grammar: Grammar::Text("a folder"),
    default: "the fixtures of this project",
    code: "",
    reader: Reader::Tests,
};

/// `ACCEL_INSECURE`: whether several hosts may meet without a token.
pub const INSECURE: Variable = Variable {
    name: "ACCEL_INSECURE",
    meaning: "whether several hosts may meet without a token",
    grammar: Grammar::Switch,
    default: "0",
    code: "",
    reader: Reader::LauncherAndRanks,
};

/// `ACCEL_JOB`: the name of the job; ranks of another job are refused.
pub const JOB: Variable = Variable {
    name: "ACCEL_JOB",
    meaning: "the name of the job; ranks of another job are refused",
    grammar: Grammar::Text("a name"),
    default: "a new one for every launch",
    code: "",
    reader: Reader::LauncherAndRanks,
};

/// `ACCEL_LIVENESS_TIMEOUT`: after how much silence a rank counts as lost.
pub const LIVENESS_TIMEOUT: Variable = Variable {
    name: "ACCEL_LIVENESS_TIMEOUT",
    meaning: "after how much silence a rank counts as lost",
    grammar: Grammar::Seconds,
    default: "that of the transport",
    code: "liveness_timeout",
    reader: Reader::Ranks,
};

/// `ACCEL_MAX_RESTARTS`: how often the launcher restarts the job at most.
pub const MAX_RESTARTS: Variable = Variable {
    name: "ACCEL_MAX_RESTARTS",
    meaning: "how often the launcher restarts the job at most",
    grammar: Grammar::Number,
    default: "--max-restarts",
    code: "",
    reader: Reader::SetByLauncher,
};

/// `ACCEL_OVERLAP`: whether gradients are sent during backward.
pub const OVERLAP: Variable = Variable {
    name: "ACCEL_OVERLAP",
    meaning: "whether gradients are sent during backward",
    grammar: Grammar::OneOf(&["auto", "on", "off"]),
    default: "auto",
    code: "with_overlap",
    reader: Reader::Ranks,
};

/// `ACCEL_OVERSUBSCRIBE_GPUS`: whether more ranks than GPUs may share them.
pub const OVERSUBSCRIBE_GPUS: Variable = Variable {
    name: "ACCEL_OVERSUBSCRIBE_GPUS",
    meaning: "whether more ranks than GPUs may share them",
    grammar: Grammar::Switch,
    default: "0",
    code: "with_oversubscription",
    reader: Reader::LauncherAndRanks,
};

/// `ACCEL_PORT`: the port of the store.
pub const PORT: Variable = Variable {
    name: "ACCEL_PORT",
    meaning: "the port of the store",
    grammar: Grammar::Port,
    default: "--master-port",
    code: "",
    reader: Reader::SetByLauncher,
};

/// `ACCEL_PRECISION`: the type in which `forward` computes.
pub const PRECISION: Variable = Variable {
    name: "ACCEL_PRECISION",
    meaning: "the type in which `forward` computes",
    grammar: Grammar::OneOf(&["no", "f16", "bf16"]),
    default: "no",
    code: "precision",
    reader: Reader::Ranks,
};

/// `ACCEL_REDUCTION`: how gradients of GPUs reach other ranks: by NCCL, or through host memory.
pub const REDUCTION: Variable = Variable {
    name: "ACCEL_REDUCTION",
    meaning: "how gradients of GPUs reach other ranks: by NCCL, or through host memory",
    grammar: Grammar::OneOf(&["auto", "nccl", "staged"]),
    default: "auto: NCCL where every rank has a CUDA device of its own",
    code: "with_reduction",
    reader: Reader::Ranks,
};

/// `ACCEL_RESTART`: how often the job has been restarted.
pub const RESTART: Variable = Variable {
    name: "ACCEL_RESTART",
    meaning: "how often the job has been restarted",
    grammar: Grammar::Number,
    default: "0",
    code: "",
    reader: Reader::SetByLauncher,
};

/// `ACCEL_SET_BY_LAUNCHER`: the variables that the launcher has set; a program that does not know one of them ignores it.
pub const SET_BY_LAUNCHER: Variable = Variable {
    name: "ACCEL_SET_BY_LAUNCHER",
    meaning: "the variables that the launcher has set; a program that does not know one of them ignores it",
    grammar: Grammar::Text("names of variables, with commas between them"),
    default: "none",
    code: "",
    reader: Reader::SetByLauncher,
};

/// `ACCEL_STORE`: who hosts the store.
pub const STORE: Variable = Variable {
    name: "ACCEL_STORE",
    meaning: "who hosts the store",
    grammar: Grammar::OneOf(&["launcher", "rank0"]),
    default: "rank0",
    code: "",
    reader: Reader::SetByLauncher,
};

/// `ACCEL_TOKEN_FILE`: the file that holds the job token.
pub const TOKEN_FILE: Variable = Variable {
    name: "ACCEL_TOKEN_FILE",
    meaning: "the file that holds the job token",
    grammar: Grammar::ExistingFile,
    default: "none",
    code: "",
    reader: Reader::LauncherAndRanks,
};

/// `ACCEL_TRACE`: the file of the trace.
pub const TRACE: Variable = Variable {
    name: "ACCEL_TRACE",
    meaning: "the file of the trace",
    grammar: Grammar::NewFile,
    default: "none",
    code: "with_trace",
    reader: Reader::Ranks,
};

/// `ACCEL_TRACE_SCHEDULE`: which steps are traced.
pub const TRACE_SCHEDULE: Variable = Variable {
    name: "ACCEL_TRACE_SCHEDULE",
    meaning: "which steps are traced",
    grammar: Grammar::TraceSchedule,
    default: "none: one trace of everything",
    code: "with_trace_schedule",
    reader: Reader::Ranks,
};

/// `ACCEL_TRANSPORT`: how ranks exchange data.
pub const TRANSPORT: Variable = Variable {
    name: "ACCEL_TRANSPORT",
    meaning: "how ranks exchange data",
    grammar: Grammar::OneOf(&["auto", "hierarchical", "shm", "tcp", "threads"]),
    default: "auto",
    code: "transport",
    reader: Reader::Ranks,
};
