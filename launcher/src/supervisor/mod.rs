//! Starting, watching and ending the processes of a job. `README.md` beside this file explains the design.

pub(crate) mod attempt;
pub(crate) mod group;
pub(crate) mod group_machine;
pub(crate) mod leftovers;
pub(crate) mod regroup;
pub(crate) mod root_cause;
pub(crate) mod run;
pub(crate) mod shim;
pub(crate) mod signals;
pub(crate) mod spawner;
pub(crate) mod store;
