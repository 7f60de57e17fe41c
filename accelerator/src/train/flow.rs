//! The schedule of a training as a pure function of the update: the same on every rank.

use core::num::NonZeroU64;

use super::arguments::{IntervalStrategy, SaveStrategy, TrainingArguments};
use super::console::TableRows;
use super::rates::LrSchedule;
use super::state::TrainerControl;

/// The number of updates, the rate of each, and after which of them something is logged, evaluated and saved.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    /// Batches of a rank in an epoch.
    pub(super) batches: u64,
    pub(super) updates: u64,
    pub(super) epochs: u64,
    pub(super) schedule: LrSchedule,
    logging: Every,
    logs_first: bool,
    evaluation: Every,
    /// The delay in updates or epochs, like the interval.
    eval_delay: f64,
    saving: Every,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Every {
    Never,
    Epoch,
    Updates(NonZeroU64),
}

impl Flow {
    /// Makes the flow of arguments without contradictions, for that many batches of each rank per epoch, at least 1.
    pub(super) fn new(arguments: &TrainingArguments, batches: u64) -> Self {
        let accumulation = arguments.gradient_accumulation_steps.max(1) as u64;
        let updates_per_epoch = batches.div_ceil(accumulation).max(1);
        let (updates, epochs) = match u64::try_from(arguments.max_steps) {
            Ok(updates) => (updates, updates.div_ceil(updates_per_epoch)),
            Err(_) => {
                let epochs = arguments.num_train_epochs;
                let updates = (epochs * updates_per_epoch as f64).ceil() as u64;
                (updates, epochs.ceil() as u64)
            }
        };
        let warmup = match arguments.warmup_steps {
            0.0 => (updates as f64 * arguments.warmup_ratio).ceil() as u64,
            share if share < 1.0 => (updates as f64 * share).ceil() as u64,
            steps => steps as u64,
        };
        let interval = |strategy, steps| Every::new(strategy, steps, updates);
        let save_strategy = match arguments.save_strategy {
            // Those are saved when an evaluation has said so.
            SaveStrategy::No | SaveStrategy::Best => IntervalStrategy::No,
            SaveStrategy::Steps => IntervalStrategy::Steps,
            SaveStrategy::Epoch => IntervalStrategy::Epoch,
        };
        let eval_steps = arguments.eval_steps.unwrap_or(arguments.logging_steps);
        Self {
            batches,
            updates,
            epochs,
            schedule: LrSchedule {
                kind: arguments.lr_scheduler_type,
                kwargs: arguments.lr_scheduler_kwargs,
                rate: arguments.learning_rate,
                updates,
                warmup,
            },
            logging: interval(arguments.logging_strategy, arguments.logging_steps),
            logs_first: arguments.logging_first_step,
            evaluation: interval(arguments.eval_strategy, eval_steps),
            eval_delay: arguments.eval_delay,
            saving: interval(save_strategy, arguments.save_steps),
        }
    }

    /// Returns what is due after that update, counted from 1.
    pub(super) fn after_update(&self, update: u64) -> TrainerControl {
        let is_last = update >= self.updates;
        let is_due = |interval: Every| match interval {
            Every::Updates(every) => update.is_multiple_of(every.get()),
            Every::Never | Every::Epoch => false,
        };
        let at_end = |interval| is_last && matches!(interval, Every::Updates(_));
        TrainerControl {
            should_log: is_due(self.logging) || (self.logs_first && update == 1),
            should_evaluate: (is_due(self.evaluation) && self.eval_delay <= update as f64)
                || at_end(self.evaluation),
            should_save: is_due(self.saving) || at_end(self.saving),
            ..TrainerControl::default()
        }
    }

    /// Returns what is due at the end of an epoch, given the epochs trained, perhaps not the whole of the last one.
    pub(super) fn after_epoch(&self, epochs: f64) -> TrainerControl {
        TrainerControl {
            should_log: self.logging == Every::Epoch,
            should_evaluate: self.evaluation == Every::Epoch && self.eval_delay <= epochs,
            should_save: self.saving == Every::Epoch,
            ..TrainerControl::default()
        }
    }

    /// Tells if that update may be the last before a log.
    pub(super) fn may_log(&self, update: u64, ends_epoch: bool) -> bool {
        let ends_epoch = ends_epoch || update >= self.updates;
        self.after_update(update).should_log || (ends_epoch && self.logging == Every::Epoch)
    }

    pub(super) fn rows(&self) -> TableRows {
        match self.evaluation {
            Every::Never => TableRows::Logs,
            Every::Epoch => TableRows::Epochs,
            Every::Updates(_) => TableRows::Evaluations,
        }
    }
}

impl Every {
    fn new(strategy: IntervalStrategy, steps: f64, updates: u64) -> Self {
        match strategy {
            IntervalStrategy::No => Self::Never,
            IntervalStrategy::Epoch => Self::Epoch,
            IntervalStrategy::Steps => {
                let steps = match steps < 1.0 {
                    true => (steps * updates as f64).ceil(),
                    false => steps,
                };
                Self::Updates(NonZeroU64::new(steps as u64).unwrap_or(NonZeroU64::MIN))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> TrainingArguments {
        TrainingArguments {
            num_train_epochs: 1.0,
            ..TrainingArguments::default()
        }
    }

    fn updates(flow: &Flow, due: impl Fn(TrainerControl) -> bool) -> Vec<u64> {
        let updates = 1..=flow.updates;
        updates
            .filter(|&update| due(flow.after_update(update)))
            .collect()
    }

    /// The cases of Hugging Face's Trainer, executed.
    #[test]
    fn numbers_of_updates_are_those_of_hugging_face() {
        // Batches of an epoch, accumulation, epochs, max_steps: updates, epochs.
        for (batches, accumulation, epochs, max_steps, expected) in [
            (5, 1, 1.0, -1, (5, 1)),
            (5, 2, 2.0, -1, (6, 2)),
            (5, 1, 3.0, 7, (7, 2)),
            (5, 1, 1.5, -1, (8, 2)),
            (938, 1, 1.0, -1, (938, 1)),
            (469, 1, 1.0, -1, (469, 1)),
            (118, 1, 1.0, -1, (118, 1)),
            (1, 4, 1.0, -1, (1, 1)),
            (5, 1, 1.0, 0, (0, 0)),
        ] {
            let flow = Flow::new(
                &TrainingArguments {
                    gradient_accumulation_steps: accumulation,
                    max_steps,
                    num_train_epochs: epochs,
                    ..arguments()
                },
                batches,
            );
            assert_eq!(
                (flow.updates, flow.epochs),
                expected,
                "{batches} {accumulation} {epochs}"
            );
        }
    }

    #[test]
    fn intervals_and_the_last_update_are_those_of_hugging_face() {
        let flow = Flow::new(
            &TrainingArguments {
                eval_steps: Some(3.0),
                eval_strategy: IntervalStrategy::Steps,
                logging_steps: 3.0,
                max_steps: 7,
                save_steps: 4.0,
                ..arguments()
            },
            5,
        );
        assert_eq!(updates(&flow, |due| due.should_log), [3, 6]);
        assert_eq!(updates(&flow, |due| due.should_evaluate), [3, 6, 7]);
        assert_eq!(updates(&flow, |due| due.should_save), [4, 7]);

        let shares = Flow::new(
            &TrainingArguments {
                eval_steps: Some(0.25),
                eval_strategy: IntervalStrategy::Steps,
                logging_steps: 0.1,
                num_train_epochs: 2.0,
                save_steps: 0.5,
                ..arguments()
            },
            10,
        );
        assert_eq!(
            updates(&shares, |due| due.should_log),
            [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
        );
        assert_eq!(updates(&shares, |due| due.should_evaluate), [5, 10, 15, 20]);
        assert_eq!(updates(&shares, |due| due.should_save), [10, 20]);
    }

    #[test]
    fn an_evaluation_is_delayed() {
        let flow = Flow::new(
            &TrainingArguments {
                eval_delay: 3.0,
                eval_steps: Some(2.0),
                eval_strategy: IntervalStrategy::Steps,
                ..arguments()
            },
            5,
        );
        assert_eq!(updates(&flow, |due| due.should_evaluate), [4, 5]);
    }

    #[test]
    fn warm_up_is_a_number_or_a_share() {
        for (steps, ratio, expected) in
            [(3.0, 0.5, 3), (0.25, 0.0, 3), (0.0, 0.25, 3), (0.0, 0.0, 0)]
        {
            let flow = Flow::new(
                &TrainingArguments {
                    warmup_ratio: ratio,
                    warmup_steps: steps,
                    ..arguments()
                },
                10,
            );
            assert_eq!(flow.schedule.warmup, expected, "{steps} {ratio}");
        }
    }
}
