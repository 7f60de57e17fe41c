//! A dead rank is named: runs every fault in every operation, over the transports in turn. `matrix` without `--sample`
//! runs them over all transports.

use std::process::Command;

use accelerator_tests::processes::{launcher, run_alone};

#[test]
fn a_dead_rank_is_named_by_every_survivor_whatever_happens_and_wherever() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_matrix"));
    command.arg("--sample");
    command.env("LAUNCHER_UNDER_TEST", launcher());
    let ended = run_alone(command);
    ended.succeeded();
}
