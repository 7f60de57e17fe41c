//! Tests of plans: laws, documented tables, and the tables of Accelerate.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod laws;
mod tables;
mod vectors;
