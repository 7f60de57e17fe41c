//! Starts, watches and judges the job of a cell.

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::rank::Seen;
use super::{CULPRIT, Fault, OPERATION, STARTED, Verdict, Way, is_within};
use crate::processes::{self, Ended, launcher, run_ranks};

pub(super) fn run(way: Way, operation: &'static str, fault: Fault) -> Verdict {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Verdict::Failed(format!("this program: {error}")),
    };
    let plan = plan(operation, fault);
    let args = ["rank", operation, fault.name()];
    let sign = sign();
    let prepare = |command: &mut Command| {
        command
            .env("ACCEL_FAULTS", &plan)
            .env("RUST_BACKTRACE", "0")
            .env(SIGN, &sign);
    };
    let ended = match way {
        Way::Plain(transport) => {
            let ranks = way.world_size() / way.hosts();
            run_ranks(&program, &args, way.world_size(), |rank, command| {
                prepare(command);
                command
                    .env("ACCEL_TRANSPORT", transport.name())
                    .env("LOCAL_RANK", (rank % ranks).to_string())
                    .env("LOCAL_WORLD_SIZE", ranks.to_string());
            })
        }
        Way::Launched(transport) => {
            let mut command = Command::new(launcher());
            prepare(&mut command);
            command
                .env("ACCEL_TRANSPORT", transport.name())
                .args(["--num-processes", &way.world_size().to_string()])
                .arg("--no-prefix")
                .arg(&program)
                .args(args);
            vec![processes::run(command)]
        }
        Way::Threads => {
            let mut command = Command::new(&program);
            prepare(&mut command);
            command.args(["threads", operation, fault.name()]);
            vec![processes::run(command)]
        }
        Way::Hosts => return Verdict::Failed("no network for its hosts".to_owned()),
    };
    if let Err(why) = nothing_is_left(&sign) {
        return Verdict::Failed(format!("{why}\n{}", output(&ended)));
    }
    match judge(way, operation, fault, &ended) {
        Ok(seconds) => Verdict::Named { seconds },
        Err(why) => Verdict::Failed(format!("{why}\n{}", output(&ended))),
    }
}

pub(super) fn plan(operation: &str, fault: Fault) -> String {
    let Some(action) = fault.action() else {
        return String::new();
    };
    // A stopped rank that wakes up ends its own process, and its output is judged as well. All sleep longer than the
    // survivors' deadline plus its allowance.
    let action = match (fault, operation) {
        (Fault::Stop, "rendezvous") => "stop 6s",
        (Fault::Stop, _) => "stop 4s",
        (Fault::Slow, "rendezvous" | "connect") => "slow 6s",
        // The survivors call only after a while.
        (Fault::Slow, "idle") => "slow 7s",
        _ => action,
    };
    let place = match operation {
        "rendezvous" | "connect" => operation.to_owned(),
        // The second of the operations that are started together.
        "start_several_within" => format!("op={} within", OPERATION * STARTED + 1),
        _ if is_within(operation) => format!("op={OPERATION} within"),
        _ => format!("op={OPERATION}"),
    };
    format!("rank={CULPRIT} {place} {action}")
}

/// Returns the seconds of the slowest survivor, if all is as it should be.
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
    for survivor in (0..way.world_size()).filter(|rank| *rank != CULPRIT) {
        let Some(seen) = seen.iter().find(|seen| seen.rank == survivor) else {
            // A process that has not joined the store yet is killed with the job.
            let block = ended.iter().any(|x| x.stderr.contains("rank 1 (pid"));
            if way.is_launched() && operation == "rendezvous" && block {
                continue;
            }
            return Err(format!("rank {survivor} said nothing"));
        };
        let words = fault.words(way, operation);
        let in_group = !matches!(operation, "rendezvous" | "connect");
        let error = seen.blames(CULPRIT..CULPRIT + 1, words, in_group)?;
        let wanted = match way {
            Way::Plain(transport) | Way::Launched(transport) => transport.name(),
            Way::Threads => "threads",
            Way::Hosts => "hierarchical",
        };
        if seen.transport.as_ref().is_some_and(|found| found != wanted) {
            return Err(format!("rank {survivor}: not over {wanted}: {seen:?}"));
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
            None if lost => {
                return Err(format!("rank {survivor}: no culprit in: {}", error.text));
            }
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

/// Returns a mark for the processes of a cell, which all their children inherit.
fn sign() -> String {
    static CELLS: AtomicUsize = AtomicUsize::new(0);
    let cell = CELLS.fetch_add(1, Ordering::Relaxed);
    format!("{}-{cell}.", std::process::id())
}

/// Waits until no process of a cell runs any more.
fn nothing_is_left(sign: &str) -> Result<(), String> {
    let sign = format!("{SIGN}={sign}");
    let has_sign = |environment: Vec<u8>| {
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable == sign.as_bytes())
    };
    let deadline = Instant::now() + LAST;
    loop {
        let processes = fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?;
        let left = processes.flatten().find(|process| {
            // Unreadable for processes that have ended meanwhile, and for those of other users.
            fs::read(process.path().join("environ")).is_ok_and(has_sign)
        });
        let Some(left) = left else { return Ok(()) };
        if Instant::now() > deadline {
            let pid = left.file_name();
            return Err(format!("process {} still runs", pid.display()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the files that our jobs have in `/dev/shm`.
pub(super) fn files_in_memory() -> Vec<String> {
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("accel")).collect()
}

const SIGN: &str = "MATRIX_CELL";

/// The longest that the process that wakes a stopped one may outlive the others of its cell.
const LAST: Duration = Duration::from_secs(15);

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
