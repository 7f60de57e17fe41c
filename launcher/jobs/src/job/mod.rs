//! A job as an engine reports it, and the record of it on this machine.

mod failure;
mod record;
mod status;

pub(crate) use failure::{LAST_LINES, launcher_restarts, node_log, read_failure};
pub(crate) use record::{JobRecord, Records};
pub(crate) use status::{Failure, Instance, JobDetails, JobStatus, NodeUsage, Role};
