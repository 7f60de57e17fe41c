//! The matrix as a table.

use std::fmt::Write;

use super::{ALLOWANCE, CONNECT, Cell, FAULTS, LIVENESS, OPERATIONS, PROGRESS, Verdict, WAYS};

pub(super) fn table(cells: &[Cell]) -> String {
    let mut text = format!(
        "# What survivors see\n\nWritten by `cargo run --release -p accelerator-tests --bin matrix -- --report \
         tests/FAULTS.md`. A job of three ranks, or of two hosts with two ranks each; rank 1 suffers the fault. A time is how long \
         the slowest survivor took, in seconds, to return a typed error that names rank 1, its host \
         and process, the cause, and the operation with its sequence number; its next call fails \
         alike. Nothing is left of a job: no process, no file in `/dev/shm`. Deadlines: 1 s for a death, {} s for silence (stop), {} s for slowness (the progress \
         timeout of this job), {} s for a rank that never came (its connect timeout). A cell fails {} s after its \
         deadline, since the machine that runs this may be busy.\n\n\
         A fault strikes when rank 1 has declared the operation and sent its first data; where a name ends \
         with `_within`, behind that, when the others have begun to reduce or to read. `idle`: nothing is pending \
         when it happens; the next call is timed. The two hosts are one: the ranks of the second count \
         their local ranks anew.\n",
        LIVENESS.as_secs(),
        PROGRESS.as_secs(),
        CONNECT.as_secs(),
        ALLOWANCE.as_secs_f64()
    );
    for way in WAYS {
        let of_way: Vec<&Cell> = cells.iter().filter(|cell| cell.way == way).collect();
        if of_way.is_empty() {
            continue;
        }
        let names: Vec<&str> = FAULTS.iter().map(|fault| fault.name()).collect();
        let _ = write!(
            text,
            "\n## {}\n\n| operation | {} |\n|---|{}\n",
            way.title(),
            names.join(" | "),
            "---|".repeat(names.len())
        );
        let mut reasons: Vec<&str> = Vec::new();
        for operation in OPERATIONS {
            let mut row = format!("| {operation} |");
            for fault in FAULTS {
                let cell = of_way
                    .iter()
                    .find(|cell| cell.operation == operation && cell.fault == fault);
                match cell.map(|cell| &cell.verdict) {
                    None => row.push_str("  |"),
                    Some(Verdict::Named { seconds }) => {
                        let _ = write!(row, " {seconds:.2} |");
                    }
                    Some(Verdict::NotApplicable(reason)) => {
                        let number = reasons.iter().position(|known| known == reason);
                        let number = number.unwrap_or_else(|| {
                            reasons.push(reason);
                            reasons.len() - 1
                        });
                        let _ = write!(row, " n/a ({}) |", number + 1);
                    }
                    Some(Verdict::Failed(_)) => row.push_str(" **failed** |"),
                }
            }
            text.push_str(&row);
            text.push('\n');
        }
        text.push('\n');
        for (index, reason) in reasons.iter().enumerate() {
            let _ = writeln!(text, "{}. {reason}", index + 1);
        }
    }
    text
}
