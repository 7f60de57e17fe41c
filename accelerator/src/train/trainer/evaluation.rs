use core::fmt;
use std::time::Instant;

use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Shape, Tensor, TensorData};

use super::parts::eval_loader;
use super::{PredictionOutput, Trainer};
use crate::core::error::{self, Error, Result};
use crate::core::tensors::{TensorMap, Tensors};
use crate::data::{Batch, PreparedLoader};
use crate::ema::Ema;
use crate::metric::Mean;
use crate::train::arguments::SaveStrategy;
use crate::train::loss::{Inputs, LossOutput};
use crate::train::state::{BestCandidate, LogEntry, Metrics, ModelCell};

/// The treatment of outputs: gathered for the program, or used for its metrics only.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Predictions {
    Dropped,
    Kept,
}

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Evaluates the model on the data of [`eval_dataset`](super::TrainerBuilder::eval_dataset). Returns `eval_loss`,
    /// the mean over all samples of all ranks, each once; the program's own metrics; and `eval_runtime`,
    /// `eval_samples_per_second`, `eval_steps_per_second` and `epoch`. Every rank must call it, and gets the same
    /// result.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] without evaluation data; those of the program's metrics and its data;
    /// [`Error::is_collective`] when a rank is lost.
    pub fn evaluate(&mut self) -> Result<Metrics> {
        Ok(self.evaluate_and_log()?.metrics)
    }

    /// Returns the output of the model for each sample of a data set. Every rank must call it with the same data, and
    /// gets the same result.
    ///
    /// # Errors
    ///
    /// The errors of the program's metrics and its data; [`Error::is_collective`] when a rank is lost.
    pub fn predict(&self, dataset: impl Dataset<I> + 'static) -> Result<PredictionOutput<P>> {
        let loader = eval_loader(&self.arguments, &self.collator, dataset);
        let loader = self.accelerator.prepare(loader)?;
        self.evaluation(&loader, "test", Predictions::Kept)
    }

    pub(super) fn evaluate_and_log(&mut self) -> Result<LogEntry> {
        let Some(loader) = &self.eval else {
            return Err(Error::config(
                "there is no evaluation data: pass `eval_dataset` to the builder of the trainer",
            ));
        };
        let mut metrics = self
            .evaluation(loader, "eval", Predictions::Dropped)?
            .metrics;
        metrics.push("epoch", self.state.epoch);
        Ok(self.log("eval", metrics))
    }

    fn evaluation(
        &self,
        loader: &PreparedLoader<O>,
        kind: &str,
        predictions: Predictions,
    ) -> Result<PredictionOutput<P>> {
        let since = Instant::now();
        let gathers = predictions == Predictions::Kept || self.compute_metrics.is_some();
        let accelerator = &self.accelerator;
        let valid = self.valid_model()?;
        let mut loss = Mean::new();
        let mut outputs = OutputRows::default();
        let mut batches = 0_u64;
        for batch in loader.eval() {
            let batch = batch?;
            let output = self.compute_loss(&valid, &batch);
            loss.update_with(output.loss.clone(), output.count(&batch));
            if gathers {
                outputs.add(accelerator.gather_for_metrics(output.outputs, &batch)?)?;
            }
            batches += 1;
        }
        let loss = accelerator.reduce_metric(loss)?;
        let outputs = outputs.joined()?;
        let mut metrics = Metrics::default();
        metrics.push(format!("{kind}_loss"), loss.value());
        if let Some(outputs) = &outputs {
            for (name, value) in self.program_metrics(outputs)?.iter() {
                metrics.push(prefixed(kind, name), value);
            }
        }
        let seconds = since.elapsed().as_secs_f64();
        let samples = loader.known_samples().unwrap_or(0);
        for (name, value) in [
            ("runtime", seconds),
            ("samples_per_second", samples as f64 / seconds),
            ("steps_per_second", batches as f64 / seconds),
        ] {
            metrics.push(format!("{kind}_{name}"), value);
        }
        Ok(PredictionOutput {
            predictions: outputs,
            metrics,
        })
    }

    /// Fails if there is no metric of the name by which checkpoints are compared: a batch is evaluated to know them.
    pub(super) fn check_metric(&self) -> Result<()> {
        let (Some(best), Some(loader)) = (self.arguments.best_metric(), &self.eval) else {
            return Ok(());
        };
        if best.key == "eval_loss" {
            return Ok(());
        }
        let Some(batch) = loader.eval().next() else {
            return Ok(());
        };
        let batch = batch?;
        let output = self.compute_loss(&self.valid_model()?, &batch);
        let outputs = self
            .accelerator
            .gather_for_metrics(output.outputs, &batch)?;
        let metrics = self.program_metrics(&outputs)?;
        let known: Vec<_> = metrics
            .iter()
            .map(|(name, _)| prefixed("eval", name))
            .collect();
        if known.contains(&best.key) {
            return Ok(());
        }
        let nearest = crate::train::words::nearest(&best.key, known.iter().map(String::as_str));
        Err(Error::config(format!(
            "metric_for_best_model: there is no metric {:?}{nearest}; evaluations have eval_loss{}",
            best.key,
            known
                .iter()
                .map(|name| format!(", {name}"))
                .collect::<String>()
        )))
    }

    pub(super) fn compute_loss(&self, model: &M, batch: &Batch<O>) -> LossOutput<P> {
        let accelerator = &self.accelerator;
        let inputs = Inputs { accelerator, batch };
        accelerator.forward(model, |model| (self.compute_loss)(model, &inputs))
    }

    /// The model that is evaluated, which records no gradients.
    fn valid_model(&self) -> Result<M> {
        match &self.ema {
            Some(ema) => Ok(ema.model().clone()),
            None => self.accelerator.valid(self.model.get()),
        }
    }

    fn program_metrics(&self, outputs: &P) -> Result<Metrics> {
        let Some(compute) = &self.compute_metrics else {
            return Ok(Metrics::default());
        };
        let context = &self.accelerator.shared.context;
        let mine = context.on_main("compute metrics", || compute(outputs.clone()))?;
        let group = self.accelerator.group().for_purpose("tell the metrics");
        let told = group.broadcast_object(mine.as_ref(), 0)?;
        Ok(told)
    }

    pub(super) fn is_saved(&self) -> bool {
        let saved = self.state.saved.as_ref();
        saved.is_some_and(|saved| saved.update == self.state.global_step)
    }

    /// Compares an evaluation with the best so far, and returns whether `save_strategy` asks for a checkpoint of it.
    pub(super) fn compare_with_best(&mut self, metrics: &Metrics) -> bool {
        let state = &mut self.state;
        let Some(best) = self.arguments.best_metric() else {
            return false;
        };
        let value = metrics.value(&best.key).filter(|value| !value.is_nan());
        let improves = |value| {
            let before = state.best_metric;
            before.is_none_or(|before| best.improves(value, before, 0.0))
        };
        let Some(metric) = value.filter(|value| state.has_begun() && improves(*value)) else {
            return false;
        };
        let update = state.global_step;
        let strategy = self.arguments.save_strategy;
        match state.saved.clone() {
            Some(saved) if saved.update == update => state.set_best(metric, saved.path),
            _ if strategy == SaveStrategy::No => state.set_best(metric, None),
            _ => {
                state.candidate = Some(BestCandidate { update, metric });
                return strategy == SaveStrategy::Best;
            }
        }
        false
    }

    /// Makes the last evaluation the best, if it was the better one, before a checkpoint of this update is saved.
    pub(super) fn settle_candidate(&mut self) {
        let update = self.state.global_step;
        if let Some(candidate) = self.state.candidate.take_if(|x| x.update == update) {
            self.state.set_best(candidate.metric, None);
        }
    }

    /// Fails if the best checkpoint so far is needed at the end and does not exist.
    pub(super) fn check_best(&self) -> Result<()> {
        let best = self.state.best_model_checkpoint.as_deref();
        let best = best.filter(|_| self.arguments.load_best_model_at_end);
        let context = &self.accelerator.shared.context;
        context.on_main("find the best checkpoint", || {
            let Some(best) = best else {
                return Ok(());
            };
            match best.try_exists() {
                Ok(true) => Ok(()),
                Ok(false) => Err(Error::config(format!(
                    "load_best_model_at_end: the best checkpoint so far, `{}`, is gone: leave the argument out, or \
                     put it back",
                    best.display()
                ))),
                Err(error) => Err(Error::io("find the best checkpoint", best, error)),
            }
        })?;
        Ok(())
    }

    pub(super) fn load_best(&mut self) -> Result<()> {
        if !self.arguments.load_best_model_at_end {
            return Ok(());
        }
        let Some(best) = self.state.best_model_checkpoint.clone() else {
            if self.accelerator.is_main_process() {
                error::warn(
                    "load_best_model_at_end: no checkpoint was saved at an evaluation, so the last weights stay",
                );
            }
            return Ok(());
        };
        let accelerator = &self.accelerator;
        let loaded = accelerator.load_model(self.model.get().clone(), &best)?;
        self.model = ModelCell::new(loaded);
        if let (Some(ema), Some(decay)) = (&self.ema, self.arguments.ema_decay) {
            let averaged = accelerator.load_model(ema.model().clone(), best.join("model-2"))?;
            self.ema = Some(Ema::new(&averaged, decay));
        }
        Ok(())
    }
}

/// `accuracy` of an evaluation is `eval_accuracy`, and so is `eval_accuracy`.
fn prefixed(kind: &str, name: &str) -> String {
    match name
        .strip_prefix(kind)
        .is_some_and(|rest| rest.starts_with('_'))
    {
        true => name.to_owned(),
        false => format!("{kind}_{name}"),
    }
}

/// Outputs of one batch after the other, which are joined by rows; in memory, since those of a data set may be more than
/// a device holds beside a training.
struct OutputRows<P> {
    /// The outputs of the first batch, for their structure.
    first: Option<P>,
    columns: Vec<Column>,
}

struct Column {
    bytes: Vec<u8>,
    dtype: DType,
    shape: Shape,
}

impl<P> Default for OutputRows<P> {
    fn default() -> Self {
        Self {
            first: None,
            columns: Vec::new(),
        }
    }
}

impl<P: Tensors> OutputRows<P> {
    fn add(&mut self, outputs: P) -> Result<()> {
        let mut taken = TakeColumns(Vec::new());
        let outputs = outputs.map_tensors(&mut taken)?;
        if self.first.is_none() {
            self.first = Some(outputs);
            self.columns = taken.0;
            return Ok(());
        }
        if taken.0.len() != self.columns.len() {
            return Err(Error::misuse(
                "batches have other numbers of outputs: `compute_loss` must return the same structure for each",
            ));
        }
        for (column, more) in self.columns.iter_mut().zip(taken.0) {
            column.bytes.extend(more.bytes);
            column.shape[0] += more.shape[0];
        }
        Ok(())
    }

    fn joined(self) -> Result<Option<P>> {
        let mut joined = Joined(self.columns.into_iter());
        let first = self.first.map(|first| first.map_tensors(&mut joined));
        first.transpose()
    }
}

struct TakeColumns(Vec<Column>);

impl TensorMap for TakeColumns {
    fn map<const D: usize, K: Basic + 'static>(
        &mut self,
        tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let (bytes, shape, dtype) = tensor.to_data().into_parts();
        self.0.push(Column {
            bytes: bytes.to_vec(),
            dtype,
            shape,
        });
        Ok(tensor)
    }
}

struct Joined(std::vec::IntoIter<Column>);

impl TensorMap for Joined {
    fn map<const D: usize, K: Basic + 'static>(
        &mut self,
        first: Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let device = first.device();
        Ok(match self.0.next() {
            Some(Column {
                bytes,
                dtype,
                shape,
            }) => {
                let data = TensorData::from_bytes_vec(bytes, shape, dtype);
                Tensor::from_data(data, (&device, dtype))
            }
            None => first,
        })
    }
}
