//! Topology, rendezvous, process groups, transports and collectives.
//!
//! A job is a number of *ranks*: processes, or threads of one process. [`Launch`] reads from the
//! environment which one this is, [`ProcessGroup::connect`] finds the others and connects to
//! them, and a [`ProcessGroup`] computes with them: all-reduce, broadcast, gathers, barriers and
//! objects.
//!
//! ```
//! use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};
//!
//! # fn main() -> accelerator_collective::Result<()> {
//! let launch = Launch::from_vars(|_| None)?; // a program reads Launch::from_env()
//! let group = ProcessGroup::connect(&launch, &GroupOptions::new())?;
//! let mut values = [1.0_f32, 2.0];
//! group.all_reduce(&mut values, ReduceOp::Mean)?;
//! group.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! Every operation is:
//!
//! - **Deterministic.** Values are combined in rank order; all ranks get the same bits, run after
//!   run and over every transport that groups the ranks alike.
//! - **Checked.** Every rank declares what it calls; ranks that disagree all get one error that
//!   shows every side.
//! - **Bounded.** Nothing waits for ever: a rank that is gone, or does not come in time, is named.

mod buffer;
mod element;
mod error;
mod fingerprint;
#[cfg(feature = "fuzzing")]
mod fuzzing;
mod group;
mod kernel;
mod launch;
mod liveness;
mod processor;
mod rendezvous;
mod shard_layout;
mod shm;
mod shm_ops;
mod socket;
mod topology;
mod transport;
mod wire;

pub use buffer::Buffer;
pub use element::{DType, Element, ReduceOp};
pub use error::{Culprit, Error, Result};
pub use group::{Activity, Busy, GroupOptions, Pending, ProcessGroup};
pub use launch::{Launch, LaunchSource};
pub use shard_layout::Partition;
pub use topology::{Topology, TransportKind};

/// Items for the launcher and the other crates of this project. They are not part of the public API.
#[doc(hidden)]
pub mod internal {
    pub use crate::{
        buffer::BufferSlice,
        error::stderr_fallback,
        fingerprint::OpKind,
        group::{ExecThread, Forbidden, NextPlace, OpEvent},
        launch::{
            AgentHead, AgentLaunch, AgentProcesses, NodeCount, Origin, Setting, check_alone,
            expand_hosts, place_variables,
        },
        processor::TargetFeatures,
        rendezvous::{
            FailureReport, FlightRecords, PendingHandshake, PendingHandshakes, Rendezvous, Report,
            Security, StoreHost, StoreOptions, StoreServer, Token, flight_records, is_own_address,
            listen_at, listen_everywhere,
        },
        shard_layout::ShardLayout,
        socket::limit_backoff,
        wire::message::{OpRecord, RankStatus},
    };

    #[cfg(feature = "fuzzing")]
    pub use crate::fuzzing::{frames as fuzz_frames, messages as fuzz_messages};
    #[cfg(target_os = "linux")]
    pub use crate::launch::{inherited, spawn_with_inherited};
}
