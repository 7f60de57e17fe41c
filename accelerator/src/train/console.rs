//! The output of rank 0: the banner, a table while training runs, and a bar on a terminal.

use core::fmt::Write;

use super::arguments::TrainingArguments;
use super::state::{LogEntry, Metrics, TrainerState};
use crate::accelerator::Accelerator;

/// The table, as Hugging Face's notebooks show it: a row for each evaluation or, without evaluations, for each log.
#[derive(Debug)]
pub(super) struct Console {
    #[cfg(feature = "progress")]
    bar: Option<indicatif::ProgressBar>,
    rows: TableRows,
    has_header: bool,
    /// The metrics beside the loss, once they are known.
    columns: Vec<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum TableRows {
    Epochs,
    Evaluations,
    /// Logs: there are no evaluations.
    Logs,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Banner {
    pub(super) samples: u64,
    pub(super) epochs: u64,
    pub(super) batch: u64,
    /// The samples of an update, over all ranks.
    pub(super) total_batch: u64,
    pub(super) accumulation: usize,
    pub(super) updates: u64,
    pub(super) parameters: usize,
}

impl Console {
    pub(super) fn new(rows: TableRows) -> Self {
        Self {
            #[cfg(feature = "progress")]
            bar: None,
            rows,
            has_header: false,
            columns: Vec::new(),
        }
    }

    /// The lines that Hugging Face prints when training begins or continues.
    pub(super) fn on_train_begin(
        &mut self,
        accelerator: &Accelerator,
        arguments: &TrainingArguments,
        banner: Banner,
        state: &TrainerState,
    ) {
        let mut text = String::from("***** Running training *****\n");
        for (name, number) in [
            ("Num examples", banner.samples),
            ("Num Epochs", banner.epochs),
            ("Instantaneous batch size per device", banner.batch),
            (
                "Total train batch size (w. parallel, distributed & accumulation)",
                banner.total_batch,
            ),
            ("Gradient Accumulation steps", banner.accumulation as u64),
            ("Total optimization steps", banner.updates),
            ("Number of trainable parameters", banner.parameters as u64),
        ] {
            // Writing to a string does not fail.
            let _ = writeln!(text, "  {name} = {number}");
        }
        if state.global_step > 0 {
            let _ = writeln!(
                text,
                "  Resuming training at epoch {} and global step {}",
                state.epoch, state.global_step
            );
        }
        if state.global_step >= banner.updates {
            let _ = writeln!(text, "  Nothing is left to train");
        }
        accelerator.print(text.trim_end());
        #[cfg(feature = "progress")]
        {
            let bar = (!arguments.disable_tqdm).then(|| accelerator.progress(banner.updates));
            if let Some(bar) = &bar {
                bar.set_position(state.global_step);
            }
            self.bar = bar;
        }
        #[cfg(not(feature = "progress"))]
        let _ = arguments;
    }

    pub(super) fn on_step_end(&self, state: &TrainerState) {
        #[cfg(feature = "progress")]
        if let Some(bar) = &self.bar {
            bar.set_position(state.global_step);
        }
        #[cfg(not(feature = "progress"))]
        let _ = state;
    }

    pub(super) fn on_log(&mut self, accelerator: &Accelerator, entry: &LogEntry) {
        if self.rows != TableRows::Logs {
            return;
        }
        let cells = [
            ("Step".to_owned(), entry.step.to_string()),
            (
                "Training Loss".to_owned(),
                six_digits(entry.metrics.value("loss")),
            ),
        ];
        self.row(accelerator, &cells);
    }

    /// A row of an evaluation, beside the training loss that was logged last.
    pub(super) fn on_evaluate(
        &mut self,
        accelerator: &Accelerator,
        entry: &LogEntry,
        training_loss: Option<f64>,
    ) {
        if self.columns.is_empty() {
            let metrics = entry.metrics.iter();
            let own = metrics.filter_map(|(name, _)| name.strip_prefix("eval_"));
            let own = own.filter(|name| !SPEEDS.contains(name));
            self.columns = own.map(str::to_owned).collect();
        }
        let first = match self.rows {
            TableRows::Epochs => ("Epoch".to_owned(), epoch(entry.epoch)),
            TableRows::Evaluations | TableRows::Logs => ("Step".to_owned(), entry.step.to_string()),
        };
        let mut cells = vec![
            first,
            (
                "Training Loss".to_owned(),
                training_loss.map_or_else(|| "No log".to_owned(), |loss| six_digits(Some(loss))),
            ),
        ];
        for column in &self.columns {
            let value = entry.metrics.value(&format!("eval_{column}"));
            cells.push((title(column), six_digits(value)));
        }
        self.row(accelerator, &cells);
    }

    pub(super) fn on_train_end(&mut self, accelerator: &Accelerator, metrics: &Metrics) {
        #[cfg(feature = "progress")]
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        accelerator.print(metrics);
    }

    fn row(&mut self, accelerator: &Accelerator, cells: &[(String, String)]) {
        let width = |title: &str| title.len().max(8);
        let mut text = String::new();
        if !self.has_header {
            let titles = cells
                .iter()
                .map(|(title, _)| format!("{title:<0$}", width(title)));
            text = titles.collect::<Vec<_>>().join(" | ").trim_end().to_owned() + "\n";
            self.has_header = true;
        }
        let values = cells
            .iter()
            .map(|(title, value)| format!("{value:<0$}", width(title)));
        text += values.collect::<Vec<_>>().join(" | ").trim_end();
        self.print(accelerator, &text);
    }

    fn print(&self, accelerator: &Accelerator, text: &str) {
        #[cfg(feature = "progress")]
        if let Some(bar) = &self.bar {
            bar.suspend(|| accelerator.print(text));
            return;
        }
        accelerator.print(text);
    }
}

/// The numbers that every evaluation has beside its metrics.
const SPEEDS: [&str; 3] = ["runtime", "samples_per_second", "steps_per_second"];

fn six_digits(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.6}"))
}

/// `1`, and `1.6` where a training ends within an epoch.
fn epoch(epoch: f64) -> String {
    let rounded = format!("{epoch:.2}");
    rounded
        .trim_end_matches('0')
        .trim_end_matches('.')
        .to_owned()
}

/// `Validation Loss` of `loss`, `Macro f1` of `macro_f1`.
fn title(column: &str) -> String {
    if column == "loss" {
        return "Validation Loss".to_owned();
    }
    let mut letters = column.chars();
    let first = letters
        .next()
        .map(|letter| letter.to_uppercase().to_string());
    first.unwrap_or_default() + &letters.as_str().replace('_', " ")
}
