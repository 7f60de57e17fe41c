//! Fault injection: planned faults at named points, which can be replayed.
//!
//! Internal to Accelerate for Rust: no promise of stability.
//!
//! A [`FaultPlan`] says which rank gets which fault, and when: `rank=1 step=3 kill; rank=0 step=5 stop
//! 10s`. A program that is built with the feature `inject` reads it from [`VARIABLE`], and the
//! library calls [`fail_point`] at the points that a plan can name. Without the feature `fail_point` does
//! nothing, and a plan that is set is an error ([`check`]).
//!
//! ```
//! use accelerator_fault::FaultPlan;
//!
//! # fn main() -> Result<(), accelerator_fault::Error> {
//! let plan: FaultPlan = "rank=1 step=3 kill; rank=0 save=2 written exit 7".parse()?;
//! assert_eq!(plan.to_string(), "rank=1 step=3 kill; rank=0 save=2 written exit 7");
//! # Ok(())
//! # }
//! ```

mod plan;
mod points;

pub use plan::{Action, Error, Fault, FaultPlan, Point, SaveStage};
pub use points::{Effect, check, fail_point};

/// The variable that holds the plan of a process.
pub const VARIABLE: &str = "ACCEL_FAULTS";

/// The variable that says how often the job was restarted; a fault belongs to one attempt.
pub const RESTART: &str = "ACCEL_RESTART";
