//! The report of the test.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use serde::Serialize;

use crate::error::chain;

/// The result of a stage: details for people, or the reason of its failure.
pub(super) type StageResult = Result<String, StageFailure>;

/// The reason why a stage did not pass.
#[derive(Clone, Debug)]
pub(super) enum StageFailure {
    /// Something is wrong.
    Failed(String),
    /// It took longer than it may.
    TimedOut(String),
    /// It cannot run here.
    Skipped(String),
}

/// Returns a failure whose cause is `error`.
pub(super) fn failed(what: &str, error: &dyn std::error::Error) -> StageFailure {
    StageFailure::Failed(format!("{what}: {}", chain(error)))
}

/// The status of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum StageStatus {
    #[serde(rename = "ok")]
    Ok,
    #[serde(rename = "failed")]
    Failed,
    #[serde(rename = "skipped")]
    Skipped,
    #[serde(rename = "timed out")]
    TimedOut,
}

impl StageStatus {
    /// Returns `true` if the whole test fails with it.
    fn is_bad(self) -> bool {
        matches!(self, Self::Failed | Self::TimedOut)
    }
}

impl fmt::Display for StageStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Failures are in capitals.
        formatter.write_str(match self {
            Self::Ok => "ok",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
            Self::TimedOut => "TIMED OUT",
        })
    }
}

/// The results of all stages.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TestReport {
    /// True if nothing failed.
    pub(super) ok: bool,
    /// The time that it took.
    pub(super) seconds: f64,
    version: &'static str,
    num_processes: usize,
    stages: Vec<StageLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_all_reduce_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_all_reduce_seconds_min: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_all_reduce_seconds_max: Option<f64>,
    #[serde(skip)]
    shown: String,
}

/// The time from the start of `accel-launch` to the end of the first all-reduce on rank 0, as seen from outside.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchTimes {
    median: Duration,
    min: Duration,
    max: Duration,
}

impl LaunchTimes {
    /// Measures again and again.
    pub(super) fn measure(
        once: impl Fn() -> Result<Duration, StageFailure>,
    ) -> Result<Self, StageFailure> {
        let mut times = (0..RUNS).map(|_| once()).collect::<Result<Vec<_>, _>>()?;
        times.sort_unstable();
        let middle = RUNS / 2;
        Ok(Self {
            median: (times[middle - 1] + times[middle]) / 2,
            min: times[0],
            max: times[RUNS - 1],
        })
    }
}

/// An even number.
const RUNS: usize = 10;

#[derive(Clone, Debug, Serialize)]
struct StageLine {
    name: String,
    verdict: StageStatus,
    seconds: f64,
    detail: String,
}

impl TestReport {
    pub(super) fn new(num_processes: NonZeroUsize) -> Self {
        Self {
            ok: true,
            seconds: 0.0,
            version: env!("CARGO_PKG_VERSION"),
            num_processes: num_processes.get(),
            stages: Vec::new(),
            first_all_reduce_seconds: None,
            first_all_reduce_seconds_min: None,
            first_all_reduce_seconds_max: None,
            shown: String::new(),
        }
    }

    /// Adds the result of a stage; returns the line for it.
    pub(super) fn add(&mut self, name: &str, outcome: StageResult, took: Duration) -> &str {
        let (verdict, detail) = match outcome {
            Ok(detail) => (StageStatus::Ok, detail),
            Err(StageFailure::Failed(detail)) => (StageStatus::Failed, detail),
            Err(StageFailure::TimedOut(detail)) => (StageStatus::TimedOut, detail),
            Err(StageFailure::Skipped(detail)) => (StageStatus::Skipped, detail),
        };
        self.ok &= !verdict.is_bad();
        let took_text = match took.as_millis() {
            milliseconds @ 0..1000 => format!("{milliseconds} ms"),
            _ => format!("{:.1} s", took.as_secs_f64()),
        };
        let colon = if detail.is_empty() { "" } else { ": " };
        self.shown = format!("{name:.<22} {verdict} ({took_text}){colon}{detail}\n");
        self.stages.push(StageLine {
            name: name.to_owned(),
            verdict,
            seconds: took.as_secs_f64(),
            detail,
        });
        &self.shown
    }

    /// Adds the times of launches; returns them as text.
    pub(super) fn set_times(&mut self, times: LaunchTimes) -> String {
        let [median, min, max] = [times.median, times.min, times.max].map(|x| x.as_secs_f64());
        self.first_all_reduce_seconds = Some(median);
        self.first_all_reduce_seconds_min = Some(min);
        self.first_all_reduce_seconds_max = Some(max);
        format!(
            "{:.1} ms to the first all-reduce (median of {RUNS}; {:.1} to {:.1} ms)",
            median * 1e3,
            min * 1e3,
            max * 1e3
        )
    }

    pub(super) fn to_json(&self) -> String {
        // Text and numbers, which JSON always takes.
        let text = serde_json::to_string(self).unwrap_or_default();
        format!("{text}\n")
    }

    pub(super) fn summary(&self) -> String {
        let count = |wanted: fn(StageStatus) -> bool| {
            let verdicts = self.stages.iter().map(|stage| stage.verdict);
            verdicts.filter(|verdict| wanted(*verdict)).count()
        };
        let bad = count(StageStatus::is_bad);
        let skipped = match count(|verdict| verdict == StageStatus::Skipped) {
            0 => String::new(),
            skipped => format!(", {skipped} skipped"),
        };
        let seconds = self.seconds;
        match bad {
            0 => format!(
                "\nall is well: {} stages ok{skipped}, in {seconds:.1} s\n",
                count(|verdict| verdict == StageStatus::Ok)
            ),
            1 => format!("\n1 stage FAILED{skipped}, in {seconds:.1} s\n"),
            bad => format!("\n{bad} stages FAILED{skipped}, in {seconds:.1} s\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcomes: Vec<StageResult>) -> TestReport {
        let mut report = TestReport::new(NonZeroUsize::MIN);
        for outcome in outcomes {
            report.add("a", outcome, Duration::from_millis(12));
        }
        report
    }

    #[test]
    fn a_line_says_what_and_how_long() {
        let mut report = report(vec![]);
        let line = report.add("rendezvous", Ok(String::new()), Duration::from_millis(12));
        assert_eq!(line, "rendezvous............ ok (12 ms)\n");
        let outcome = Err(StageFailure::Failed("a wrong sum".into()));
        let line = report.add("tcp", outcome, Duration::from_millis(1234));
        assert_eq!(line, "tcp................... FAILED (1.2 s): a wrong sum\n");
    }

    #[test]
    fn skipped_stages_are_no_failures_and_timeouts_are() {
        let skipped = report(vec![Ok("".into()), Err(StageFailure::Skipped("no".into()))]);
        assert!(skipped.ok && skipped.summary().contains("1 stages ok, 1 skipped"));
        let late = report(vec![
            Ok("".into()),
            Err(StageFailure::TimedOut("no".into())),
        ]);
        assert!(!late.ok && late.summary().contains("1 stage FAILED"));
        let json: serde_json::Value = serde_json::from_str(&late.to_json()).unwrap();
        assert_eq!(json["stages"][1]["verdict"], "timed out");
        assert_eq!(json["ok"], false);
        assert!(json.get("first_all_reduce_seconds").is_none());
    }
}
