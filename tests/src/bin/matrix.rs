//! Runs every fault in every operation over every transport, and writes a table: see [`accelerator_tests::matrix`].
//!
//! With `--sample`, runs every fault in every place once, over the transports in turn. The faults of hosts need
//! networks, which `tests/hosts/faults` creates; it takes the same arguments.
//!
//! ```text
//! cargo run --release -p accelerator-tests --bin matrix -- --report tests/FAULTS.md
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_tests::matrix;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["rank", operation, fault] => matrix::rank(operation, fault),
        ["threads", operation, fault] => matrix::threads(operation, fault),
        ["--sample"] => matrix::sample(),
        ["--sample-of-hosts"] => matrix::sample_of_hosts(),
        ["--report", path, ref filter @ ..] => matrix::run(Some(&PathBuf::from(path)), filter),
        ref filter => matrix::run(None, filter),
    }
}
