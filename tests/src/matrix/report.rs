//! Writes the matrix as a table.

use std::fmt::Write;

use super::{ALLOWANCE, CONNECT, Cell, LIVENESS, PROGRESS, Verdict, WAYS, Way};

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
        let faults = way.faults();
        let names: Vec<&str> = faults.iter().map(|fault| fault.name()).collect();
        let _ = write!(
            text,
            "\n## {}\n\n{}| operation | {} |\n|---|{}\n",
            way.title(),
            introduction(way),
            names.join(" | "),
            "---|".repeat(names.len())
        );
        let mut reasons: Vec<&str> = Vec::new();
        for &operation in way.operations() {
            let mut row = format!("| {operation} |");
            for &fault in &faults {
                let cell = of_way
                    .iter()
                    .find(|cell| cell.operation == operation && cell.fault == fault);
                match cell.map(|cell| &cell.verdict) {
                    None => row.push_str("  |"),
                    Some(Verdict::Named { seconds }) => {
                        let _ = write!(row, " {seconds:.2} |");
                    }
                    Some(Verdict::Survived { seconds }) => {
                        let _ = write!(row, " continues, {seconds:.2} |");
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

/// Returns `new`, with the sections of `old` for ways without a cell in this run.
pub(super) fn with_sections_of(old: &str, new: &str) -> String {
    let section = |text: &str, way: Way| {
        let begin = text.find(&format!("\n## {}\n", way.title()))?;
        let rest = &text[begin + 1..];
        let end = rest.find("\n## ").map_or(rest.len(), |end| end + 1);
        Some(format!("\n{}", rest[..end].trim_end_matches('\n')))
    };
    let head = new.split("\n## ").next().unwrap_or_default();
    let mut text = head.trim_end().to_owned();
    text.push('\n');
    for way in WAYS {
        if let Some(section) = section(new, way).or_else(|| section(old, way)) {
            text.push_str(&section);
            text.push('\n');
        }
    }
    text
}

/// Returns the text before the table of a way.
fn introduction(way: Way) -> &'static str {
    match way {
        Way::Hosts => {
            "Written by `tests/hosts/faults --report tests/FAULTS.md hosts/`. Three hosts with 1, 2 and 1 ranks are network \
             namespaces, each with its own `accel-launch --node-rank`. Host 1, or host 0 where a fault ends with `-0`, \
             suffers while rank 1 pauses for a second in the operation: its launcher is killed (`kill-agent`), all of its \
             processes at once (`kill-all`), its link is down for good (`cut`) or for 3 s (`cut-3s`), a tenth of the packets \
             to it is lost (`loss`), its link has 50 Mbit/s, so packets wait (`delay`). All timeouts that find the dead are \
             the defaults; the silence for which a host is lost is 5 s.\n\n\
             A time is from the fault until the last of these has been shown: the ranks of the other hosts name the host, a \
             rank of it, the cause and the operation; the launchers of the other hosts name it with its ranks, and \
             end with exit code 75; a host that is cut off names host 0, and ends with 75. Where host 0 is lost, the others \
             end their ranks at once, and name it. `continues`: no rank sees an error, and the job has succeeded after that \
             time. In every cell nothing is left on any host. A cell fails 1.5 s after its deadline: 1 s for a death, 5 s for a link.\n\n"
        }
        _ => "",
    }
}
