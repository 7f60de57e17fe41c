//! Tests of programs on several processes, and of what documents say about tests: a module per subject.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod bad_input;
mod conformance;
mod damage;
mod examples;
mod faults;
mod invariance;
mod launched;
mod learner;
mod operator;
mod preemption;
mod progress;
mod recovery;
mod restart;
mod traces;
mod trainers;
mod tune;
mod vectors;
