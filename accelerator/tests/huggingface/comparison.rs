//! Compares our training with Hugging Face's Trainer.

use std::collections::{BTreeMap, BTreeSet};

use accelerator::train::{LogEntry, Metrics};
use burn::tensor::FloatDType;

use super::fixture::{Case, Entry, Fixture};
use super::run::Trained;

pub struct Comparison<'a> {
    case: &'a Case,
    tolerance: f64,
    pub failures: Vec<String>,
    /// The largest difference.
    pub worst: f64,
}

impl<'a> Comparison<'a> {
    pub fn new(case: &'a Case, tolerance: f64) -> Self {
        Self {
            case,
            tolerance,
            failures: Vec::new(),
            worst: 0.0,
        }
    }

    /// Compares `own`, which logged at the intervals of the case, and `stepwise`, which logged each step.
    pub fn compare(&mut self, own: &Trained, stepwise: &Trained) {
        let given = &self.case.huggingface;
        self.same("logs change weights", &own.weights, &stepwise.weights);
        self.windows(own, stepwise);
        // With a threshold, Hugging Face moves its best metric at each smaller improvement too, so it stops early and
        // ours runs to the end. Everything before the stop is the same.
        let stops_earlier = self.case.threshold() > 0.0;
        let first = self.case.resume.as_ref().map_or(0, |resume| resume.from);
        let last = if stops_earlier { given.steps } else { u64::MAX };
        let is_seen = |entry: &&LogEntry| (first + 1..=last).contains(&entry.step);
        let logged = stepwise.state.log_history.iter().filter(is_seen);
        let steps: Vec<_> = logged.filter(|entry| has(entry, "loss")).collect();
        for (name, expected) in [
            ("loss", &given.losses),
            ("grad_norm", &given.grad_norms),
            ("learning_rate", &given.learning_rates),
        ] {
            let found: Vec<_> = steps
                .iter()
                .map(|x| x.metrics.value(name).unwrap())
                .collect();
            self.close(name, &found, expected);
        }
        let log = own.state.log_history.iter();
        let log: Vec<_> = log.filter(|entry| entry.step <= last).collect();
        if stops_earlier {
            self.same(
                "ends at the end",
                own.state.epoch,
                own.arguments.num_train_epochs,
            );
            self.log(&log, &given.log[..given.log.len() - 1]);
            return;
        }
        self.same("steps", own.state.global_step, given.steps);
        self.same("saved", &own.saved, &given.saved);
        let mut kept = given.checkpoints.clone();
        if own.arguments.load_best_model_at_end && own.arguments.save_total_limit == Some(1) {
            // Ours also keeps the newest beside the best until the end.
            kept.extend(given.saved.last());
        }
        // After a resume from an older checkpoint, ours keeps the newer ones and Hugging Face overwrites them.
        let left: BTreeSet<_> = own.checkpoints.iter().copied().collect();
        self.same("checkpoints", left, kept.into_iter().collect());
        let best = given.best.as_ref();
        self.close(
            "best metric",
            &own.state.best_metric.into_iter().collect::<Vec<_>>(),
            &best.map(|best| best.metric).into_iter().collect::<Vec<_>>(),
        );
        // Hugging Face records the step when it saves.
        if let Some(step) = best.and_then(|best| best.step) {
            self.same("best step", own.state.best_global_step, Some(step));
        }
        // A resumed run of Hugging Face takes the intervals of the checkpoint and ignores those that it is given. Ours
        // follows the arguments, which `windows` checks.
        let changes = |resume: &super::fixture::Resume| !resume.arguments.is_empty();
        if !self.case.resume.as_ref().is_some_and(changes) {
            self.log(&log, &given.log);
        }
        for (path, expected) in &given.r#final {
            let found = own.weights.get(path).cloned().unwrap_or_default();
            self.close(path, &found, expected);
        }
    }

    /// Checks that each log has the mean loss of the updates since the last one, and the summary that of all updates,
    /// resumed or not.
    fn windows(&mut self, own: &Trained, stepwise: &Trained) {
        let logged = stepwise.state.log_history.iter();
        let losses: Vec<_> = logged.filter_map(|x| x.metrics.value("loss")).collect();
        let mut start = 0;
        for entry in &own.state.log_history {
            let (name, window) = match has(entry, "loss") {
                true => ("loss", &losses[start..entry.step as usize]),
                false => ("train_loss", &losses[..]),
            };
            if let Some(found) = entry.metrics.value(name) {
                let mean = window.iter().sum::<f64>() / window.len() as f64;
                self.close("the mean of a window", &[found], &[mean]);
                start = entry.step as usize;
            }
        }
        if let Some(resume) = &self.case.resume {
            let every = self.case.number("logging_steps").unwrap() as u64;
            let later = own.arguments.logging_steps as u64;
            let interval = |step| if step <= resume.from { every } else { later };
            let due = (1..=own.state.global_step).filter(|&x| x.is_multiple_of(interval(x)));
            let logged = own.state.log_history.iter().filter(|x| has(x, "loss"));
            let found: Vec<_> = logged.map(|x| x.step).collect();
            self.same("logged at", found, due.collect());
        }
    }

    fn log(&mut self, ours: &[&LogEntry], theirs: &[Entry]) {
        let step = |entry: &Entry| (entry["step"] as u64, kind(entry.keys()));
        let expected: Vec<_> = theirs.iter().map(step).collect();
        let names = |x: &LogEntry| x.metrics.iter().map(|x| x.0.to_owned()).collect::<Vec<_>>();
        let found: Vec<_> = ours
            .iter()
            .map(|x| (x.step, kind(names(x).iter())))
            .collect();
        self.same("log", found, expected);
        for (ours, theirs) in ours.iter().zip(theirs) {
            for (name, &value) in theirs {
                let found = match &**name {
                    "step" => Some(ours.step as f64),
                    "epoch" => Some(ours.epoch),
                    // Hugging Face divides the sum of this run alone by the number of all updates.
                    "train_loss" if self.case.resume.is_some() => continue,
                    name => ours.metrics.value(name),
                };
                let found: Vec<_> = found.into_iter().collect();
                self.close(&format!("log {} {name}", ours.step), &found, &[value]);
            }
        }
        let is_printed = |x: &&&LogEntry| {
            let before = self.case.resume.as_ref().map_or(0, |resume| resume.from);
            has(x, "loss") && x.step > before
        };
        let printed: Vec<_> = ours.iter().filter(is_printed).map(|x| printed(x)).collect();
        if self.case.is_exact() && self.case.dtype() == FloatDType::F64 {
            let given = self.case.huggingface.printed.iter();
            let expected: Vec<_> = given.map(|line| numbers(line)).collect();
            self.same("printed", printed, expected);
        }
    }

    fn close(&mut self, what: &str, found: &[f64], expected: &[f64]) {
        let far =
            |(found, expected): (&f64, &f64)| (found - expected).abs() / expected.abs().max(1.0);
        let worst = found.iter().zip(expected).map(far).fold(0.0, f64::max);
        self.worst = self.worst.max(worst);
        let is_close =
            found.iter().chain(expected).all(|x| x.is_finite()) && worst <= self.tolerance;
        if found.len() != expected.len() || !is_close {
            self.same(what, found, expected);
        }
    }

    fn same<T: core::fmt::Debug + PartialEq>(&mut self, what: &str, found: T, expected: T) {
        if found != expected {
            let name = &self.case.name;
            let text = format!("{name}, {what}: expected {expected:?}, found {found:?}");
            self.failures.push(text);
        }
    }
}

fn has(entry: &LogEntry, name: &str) -> bool {
    entry.metrics.value(name).is_some()
}

/// Returns the names of the metrics that tell kinds of entries apart. Times depend on the machine, and the metrics of
/// an evaluation are compared by value.
fn kind<'a>(names: impl Iterator<Item = &'a String>) -> Vec<String> {
    let is_timed = |name: &&String| name.ends_with("_runtime") || name.ends_with("_per_second");
    let names = names.filter(|name| !is_timed(name) && !["step", "epoch"].contains(&&***name));
    let mut names: Vec<_> = names.cloned().collect();
    names.sort();
    names
}

/// Returns the numbers of an entry's text, which have four digits.
fn printed(entry: &LogEntry) -> BTreeMap<String, f64> {
    let metrics = entry.metrics.iter().chain([("epoch", entry.epoch)]);
    numbers(&metrics.collect::<Metrics>().to_string())
}

/// Parses a line such as `{'loss': '9.342', 'epoch': 0.1}`.
fn numbers(line: &str) -> BTreeMap<String, f64> {
    let line = line.trim_matches(['{', '}']).replace('\'', "");
    let pairs = line.split(", ").map(|pair| pair.split_once(": ").unwrap());
    pairs
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// Runs an ignored test in a process of its own and compares the banners that it prints with those of the fixture.
pub fn check_banners(test: &str, file: &str, dtype: FloatDType) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let trainings: BTreeMap<_, _> = text
        .split("== ")
        .filter_map(|text| text.split_once('\n'))
        .collect();
    for case in Fixture::load(file).cases_in(dtype) {
        let said = trainings[&*case.name]
            .rsplit("***** Running training *****\n")
            .next()
            .unwrap();
        let epochs = format!("  Num Epochs = {}", case.huggingface.epochs);
        for line in case.huggingface.banner.iter().chain([&epochs]) {
            // Ours does not print the updates per epoch, skips batches silently, and writes no thousands separators.
            let expected = match line.split_once(" = ") {
                Some((name, _)) if name.contains("update steps per epoch") => continue,
                Some((name, value)) => format!("{name} = {}\n", value.replace(',', "")),
                None if line.contains("Resuming training") => {
                    let step = line.rsplit(' ').next().unwrap();
                    format!("and global step {step}\n")
                }
                None => continue,
            };
            assert!(
                said.contains(&expected),
                "{}: no {expected:?} in\n{said}",
                case.name
            );
        }
    }
}
