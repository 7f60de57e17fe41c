//! How long a launch takes until its ranks have computed something together.

use std::fmt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::args::Task;
use super::context::Context;
use super::ranks::{RankEvent, command, expect_success, listen};
use super::results::{LaunchTimes, StageFailure, failed};
use crate::process::{Process, RankProcess};

impl fmt::Display for LaunchTimes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(
            formatter,
            "{:.1} ms to the first all-reduce (median of {RUNS}; {:.1} to {:.1} ms)",
            ms(self.median),
            ms(self.min),
            ms(self.max)
        )
    }
}

/// Launches as a user does, again and again.
pub(super) fn measure(context: &Context) -> Result<LaunchTimes, StageFailure> {
    let mut times = (0..RUNS)
        .map(|_| once(context))
        .collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    let middle = RUNS / 2;
    Ok(LaunchTimes {
        median: (times[middle - 1] + times[middle]) / 2,
        min: times[0],
        max: times[RUNS - 1],
    })
}

fn once(context: &Context) -> Result<Duration, StageFailure> {
    let limit = context.arguments.limit;
    let mut command = command(&context.program);
    command
        .args(["--quiet", "--no-prefix", "--num-processes"])
        .arg(context.arguments.num_processes.to_string())
        .arg(&context.program)
        .args(["__rank", Task::First.name()]);
    let (sender, events) = mpsc::channel();
    let started = Instant::now();
    let mut process = Process::spawn(&mut command)
        .map_err(|error| failed("the launcher cannot start", &error))?;
    listen(0, &mut process, sender)
        .map_err(|error| failed("the launcher's output cannot be read", &error))?;
    let mut first = None;
    loop {
        if context.interrupt.signal().is_some() {
            return Err(StageFailure::TimedOut("interrupted".into()));
        }
        match events.recv_timeout(Duration::from_millis(50)) {
            Ok(RankEvent::Line { at, .. }) => first = first.or(Some(at)),
            Ok(RankEvent::Ended { end, words, .. }) => {
                expect_success(0, end, &words)?;
                process.reap();
                return match first {
                    Some(at) => Ok(at.saturating_duration_since(started)),
                    None => Err(StageFailure::Failed("rank 0 printed nothing".into())),
                };
            }
            Err(_) if started.elapsed() < limit => {}
            Err(_) => {
                return Err(StageFailure::TimedOut(format!(
                    "a launch of {} processes did not end within {} s",
                    context.arguments.num_processes,
                    limit.as_secs_f64()
                )));
            }
        }
    }
}

/// An even number.
const RUNS: usize = 10;
