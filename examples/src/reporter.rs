use core::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use accelerator::Accelerator;

use crate::args::ReportArgs;
use crate::error::{Error, Result};
use crate::records::{EpochRecord, JsonLines, StepRecord, TestRecord};
use crate::save::check_target;

/// The approximate number of lines printed per epoch.
const LINES: u64 = 10;

/// Reports how a training goes: on the console and, with `--metrics`, in a file. Only rank 0 writes, so every rank can
/// run the same program.
#[derive(Debug)]
pub struct Reporter {
    /// `None` on ranks that are silent.
    output: Option<Output>,
    run: Option<Accelerator>,
    steps_per_epoch: Option<u64>,
    epoch_step: u64,
    step: usize,
}

#[derive(Debug)]
struct Output {
    metrics: Option<JsonLines>,
    /// 0 if unknown.
    steps_per_epoch: u64,
    /// The end of the last step or validation, or the start of the training.
    last_step: Instant,
    /// Seconds since the last line on the console.
    seconds: f64,
    samples: f64,
}

impl Reporter {
    /// Creates the reporter of this rank, for a training with `steps_per_epoch` steps in an epoch. On rank 0, creates
    /// the file of `--metrics` and checks the target of `--save`, so that no training fails at its end because of them.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if one of these files cannot be created.
    pub fn new(
        rank: usize,
        args: &ReportArgs,
        steps_per_epoch: impl Into<Option<u64>>,
    ) -> Result<Self> {
        let steps_per_epoch = steps_per_epoch.into();
        let mut reporter = Self {
            output: None,
            run: None,
            steps_per_epoch,
            epoch_step: 0,
            step: 0,
        };
        if rank == 0 {
            if let Some(path) = &args.save {
                check_target(path)?;
            }
            reporter.output = Some(Output {
                metrics: args.metrics.as_deref().map(JsonLines::create).transpose()?,
                steps_per_epoch: steps_per_epoch.unwrap_or(0),
                last_step: Instant::now(),
                seconds: 0.0,
                samples: 0.0,
            });
        }
        Ok(reporter)
    }

    /// Creates a reporter that also logs to the run, if one has begun: `train/loss` and `train/lr`, `valid/loss` and
    /// `valid/accuracy`, `test/loss` and `test/accuracy`. Every rank creates one.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn tracked(
        accelerator: &Accelerator,
        args: &ReportArgs,
        steps_per_epoch: impl Into<Option<u64>>,
    ) -> Result<Self> {
        Ok(Self {
            run: Some(accelerator.clone()),
            ..Self::new(accelerator.rank(), args, steps_per_epoch)?
        })
    }

    /// Continues after `steps` optimizer steps of a resumed training.
    #[must_use]
    pub fn starting_behind(mut self, steps: u64) -> Self {
        let per_epoch = self
            .output
            .as_ref()
            .map_or(0, |output| output.steps_per_epoch);
        self.epoch_step = steps.checked_rem(per_epoch).unwrap_or(0);
        self.step = steps as usize;
        self
    }

    /// Reports an optimizer step: its epoch, loss and learning rate, and the number of samples over all ranks. Reports
    /// nothing without a loss, since then there was no step.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the console or the metrics file cannot be written.
    pub fn step(
        &mut self,
        epoch: u64,
        loss: impl Into<Option<f64>>,
        lr: f64,
        samples: impl Into<Option<f64>>,
    ) -> Result<()> {
        let (Some(loss), Some(samples)) = (loss.into(), samples.into()) else {
            return Ok(());
        };
        self.step += 1;
        self.epoch_step += 1;
        let fraction = self
            .steps_per_epoch
            .map(|steps| epoch as f64 + self.epoch_step as f64 / steps as f64);
        self.log("train", [("loss", loss), ("lr", lr)], fraction);
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        let now = Instant::now();
        let seconds = now.duration_since(output.last_step).as_secs_f64();
        output.last_step = now;
        output.seconds += seconds;
        output.samples += samples;
        output.record(&StepRecord {
            step: self.step,
            epoch,
            loss,
            lr,
            samples_per_second: rate(samples, seconds),
        })?;
        let every = output.steps_per_epoch.div_ceil(LINES).max(1);
        if self.epoch_step.is_multiple_of(every) || self.epoch_step == output.steps_per_epoch {
            print(format_args!(
                "epoch {epoch} step {}/{} loss {loss:.4} lr {lr} {:.0} samples/s",
                self.epoch_step,
                output.steps_per_epoch,
                rate(output.samples, output.seconds),
            ))?;
            (output.seconds, output.samples) = (0.0, 0.0);
        }
        Ok(())
    }

    /// Reports the validation after an epoch: the mean loss, and the accuracy from 0 to 1.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the console or the metrics file cannot be written.
    pub fn validated(&mut self, epoch: u64, loss: f64, accuracy: f64) -> Result<()> {
        self.epoch_step = 0;
        let figures = [("loss", loss), ("accuracy", accuracy)];
        self.log("valid", figures, Some((epoch + 1) as f64));
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        output.record(&EpochRecord {
            epoch,
            validation_loss: loss,
            validation_accuracy: accuracy,
        })?;
        print(format_args!(
            "epoch {epoch} validation loss {loss:.4} accuracy {:.1} %",
            100.0 * accuracy
        ))?;
        // The time of a validation belongs to no step.
        output.last_step = Instant::now();
        Ok(())
    }

    /// Reports the test at the end: the mean loss, and the accuracy from 0 to 1.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the console or the metrics file cannot be written.
    pub fn tested(&mut self, loss: f64, accuracy: f64) -> Result<()> {
        self.log("test", [("loss", loss), ("accuracy", accuracy)], None);
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        output.record(&TestRecord {
            test_loss: loss,
            test_accuracy: accuracy,
        })?;
        print(format_args!("test loss {loss:.4}"))?;
        print(format_args!("test accuracy {:.1} %", 100.0 * accuracy))
    }

    fn log<const N: usize>(&self, kind: &str, figures: [(&str, f64); N], epoch: Option<f64>) {
        if let Some(accelerator) = &self.run {
            accelerator.log(kind, figures, self.step as u64, epoch);
        }
    }
}

impl Output {
    fn record(&mut self, record: &impl serde::Serialize) -> Result<()> {
        match &mut self.metrics {
            Some(metrics) => metrics.write(record),
            None => Ok(()),
        }
    }
}

fn rate(samples: f64, seconds: f64) -> f64 {
    samples / seconds.max(1e-9)
}

/// Prints a line. Unlike `println!`, it returns an error if standard output is closed.
fn print(line: fmt::Arguments<'_>) -> Result<()> {
    writeln!(io::stdout().lock(), "{line}")
        .map_err(|error| Error::io("print to", Path::new("standard output"), error))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_training_is_recorded_line_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let args = ReportArgs {
            metrics: Some(path.clone()),
            save: None,
        };
        let mut reporter = Reporter::new(0, &args, 2).unwrap();
        for epoch in 0..2 {
            reporter.step(epoch, 2.5, 0.1, 64.0).unwrap();
            reporter.step(epoch, None, 0.1, None).unwrap();
            reporter.step(epoch, 1.5, 0.1, 32.0).unwrap();
            reporter.validated(epoch, 0.5, 0.75).unwrap();
        }
        reporter.tested(0.25, 0.875).unwrap();

        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(lines.len(), 7);
        let steps: Vec<_> = lines.iter().filter_map(|l| l["step"].as_u64()).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        assert_eq!(
            (&lines[4]["epoch"], &lines[4]["loss"]),
            (&1.into(), &1.5.into())
        );
        assert!(lines[0]["samples_per_second"].as_f64().unwrap() > 0.0);
        assert_eq!(lines[2]["validation_accuracy"], 0.75);
        assert_eq!(lines[6]["test_accuracy"], 0.875);
    }

    #[test]
    fn other_ranks_are_silent() {
        let args = ReportArgs {
            metrics: Some("/nowhere/metrics.jsonl".into()),
            save: None,
        };
        let mut reporter = Reporter::new(1, &args, 2).unwrap();
        reporter.step(0, 2.5, 0.1, 64.0).unwrap();
        reporter.tested(0.25, 0.875).unwrap();
        assert!(Reporter::new(0, &args, 2).unwrap_err().is_io());
    }

    #[test]
    fn a_target_without_a_folder_is_an_error_before_training() {
        let args = ReportArgs {
            metrics: None,
            save: Some("/nowhere/model.safetensors".into()),
        };
        assert!(Reporter::new(0, &args, 2).unwrap_err().is_io());
    }
}
