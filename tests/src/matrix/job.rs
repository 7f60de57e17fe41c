//! A cell's job: started, watched, judged.

use std::process::Command;

use super::rank::Seen;
use super::{CULPRIT, Fault, OPERATION, Verdict, WORLD_SIZE, Way};
use crate::processes::{Ended, launcher, run_all, run_ranks};

pub(super) fn run(way: Way, operation: &'static str, fault: Fault) -> Verdict {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Verdict::Failed(format!("this program: {error}")),
    };
    let plan = plan(operation, fault);
    let args = ["rank", operation, fault.name()];
    let ended = match way {
        Way::Plain => run_ranks(&program, &args, WORLD_SIZE, |_, command| {
            command
                .env("ACCEL_FAULTS", &plan)
                .env("RUST_BACKTRACE", "0");
        }),
        Way::Launched => {
            let mut command = Command::new(launcher());
            command
                .env("RUST_BACKTRACE", "0")
                .args(["--num-processes", &WORLD_SIZE.to_string(), "--no-prefix"])
                .arg(&program)
                .args(args)
                .env("ACCEL_FAULTS", &plan);
            run_all(std::iter::once(command))
        }
        Way::Threads => {
            let mut command = Command::new(&program);
            command
                .env("RUST_BACKTRACE", "0")
                .args(["threads", operation, fault.name()])
                .env("ACCEL_FAULTS", &plan);
            run_all(std::iter::once(command))
        }
    };
    match judge(way, operation, fault, &ended) {
        Ok(seconds) => Verdict::Named { seconds },
        Err(why) => Verdict::Failed(format!("{why}\n{}", output(&ended))),
    }
}

fn plan(operation: &str, fault: Fault) -> String {
    let Some(action) = fault.action() else {
        return String::new();
    };
    // Where a stopped rank wakes up after a while, its process ends by itself: what it says then
    // is judged as well.
    let action = match fault {
        Fault::Stop => "stop 6s",
        _ => action,
    };
    let place = match operation {
        "rendezvous" | "connect" => operation.to_owned(),
        _ => format!("op={OPERATION}"),
    };
    format!("rank={CULPRIT} {place} {action}")
}

/// How long the slowest survivor took, where all is as it should be.
fn judge(way: Way, operation: &str, fault: Fault, ended: &[Ended]) -> Result<f64, String> {
    let seen: Vec<Seen> = ended
        .iter()
        .flat_map(|ended| ended.stdout.lines())
        .filter_map(|line| line.strip_prefix("SEEN "))
        .map(|line| serde_json::from_str(line).map_err(|error| error.to_string()))
        .collect::<Result<_, _>>()?;
    let pid = ended
        .iter()
        .flat_map(|ended| ended.stdout.lines())
        .find_map(|line| line.strip_prefix(&format!("STARTED {CULPRIT} ")))
        .and_then(|pid| pid.parse::<u32>().ok());
    let mut slowest: f64 = 0.0;
    for survivor in (0..WORLD_SIZE).filter(|rank| *rank != CULPRIT) {
        let Some(seen) = seen.iter().find(|seen| seen.rank == survivor) else {
            // A process that has not come to the store yet is ended with the job.
            let block = ended.iter().any(|x| x.stderr.contains("rank 1 (pid"));
            if way == Way::Launched && operation == "rendezvous" && block {
                continue;
            }
            return Err(format!("rank {survivor} said nothing"));
        };
        let Some(error) = &seen.error else {
            return Err(format!("rank {survivor} saw no error"));
        };
        let text = &error.text;
        if !error.typed {
            return Err(format!(
                "rank {survivor}: an error of no expected type: {text}"
            ));
        }
        if error.ranks != [CULPRIT] {
            return Err(format!("rank {survivor} blames {:?}: {text}", error.ranks));
        }
        let words = fault.words(way, operation);
        if !words.iter().any(|word| text.contains(word)) {
            return Err(format!("rank {survivor}: none of {words:?} in: {text}"));
        }
        let in_group = !matches!(operation, "rendezvous" | "connect");
        if in_group && !text.contains("collective #") {
            return Err(format!("rank {survivor}: no operation in: {text}"));
        }
        if in_group && seen.later.is_none() {
            return Err(format!("rank {survivor}: the next call succeeded"));
        }
        let lost = in_group && !matches!(fault, Fault::Slow | Fault::CorruptFrame);
        match &error.culprit {
            Some(culprit) if culprit.rank != CULPRIT => {
                return Err(format!("rank {survivor}: culprit {culprit:?}"));
            }
            Some(culprit) if lost && way != Way::Threads => {
                if culprit.pid.is_none() || culprit.pid != pid || culprit.host.is_empty() {
                    return Err(format!(
                        "rank {survivor}: another process than {pid:?}: {culprit:?}"
                    ));
                }
                if !words.iter().any(|word| culprit.cause.contains(word)) {
                    return Err(format!("rank {survivor}: none of {words:?} in {culprit:?}"));
                }
            }
            None if lost => return Err(format!("rank {survivor}: no culprit in: {text}")),
            _ => {}
        }
        slowest = slowest.max(seen.seconds);
    }
    let deadline = fault.deadline(way, operation) + super::ALLOWANCE;
    if slowest > deadline.as_secs_f64() {
        return Err(format!("{slowest:.2} s, later than {deadline:?}"));
    }
    Ok(slowest)
}

fn output(ended: &[Ended]) -> String {
    let texts = ended.iter().map(|ended| {
        format!(
            "--- {}\n{}\n{}",
            ended.status,
            ended.stdout.trim(),
            ended.stderr.trim()
        )
    });
    texts.collect::<Vec<_>>().join("\n")
}
