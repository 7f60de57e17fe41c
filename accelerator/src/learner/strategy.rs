//! The loop of a training of burn-train, on each rank.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::data::dataset::DatasetError;
use burn::tensor::{Int, Tensor};
use burn_train::{
    ClassificationOutput, EventProcessorError, EventProcessorTraining, InferenceStep, Interrupter,
    Learner, LearnerEvent, LearnerModel, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader,
    TrainStep, TrainingComponents, TrainingItem, ValidLoader,
};
use serde::{Deserialize, Serialize};

use crate::Accelerator;
use crate::core::agreement;
use crate::core::error::{Error, Result};
use crate::core::tensors::Tensors;
use crate::data::PreparedLoader;
use crate::unit;

type Input<M> = <M as TrainStep>::Input;
type ValidInput<M> = <M as InferenceStep>::Input;
type TrainEvent<M> = LearnerEvent<<M as TrainStep>::Output>;
type ValidEvent<M> = LearnerEvent<<M as InferenceStep>::Output>;

/// Trains on this rank's share, in step with the other ranks.
pub(super) struct ProcessStrategy<M: LearnerModel> {
    accelerator: Accelerator,
    train: Arc<PreparedLoader<Input<M>>>,
    valid: Arc<PreparedLoader<ValidInput<M>>>,
}

impl<M: LearnerModel> ProcessStrategy<M> {
    pub(super) fn new(
        accelerator: &Accelerator,
        train: Arc<PreparedLoader<Input<M>>>,
        valid: Arc<PreparedLoader<ValidInput<M>>>,
    ) -> Self {
        Self {
            accelerator: accelerator.clone(),
            train,
            valid,
        }
    }
}

impl<M> SupervisedLearningStrategy<M> for ProcessStrategy<M>
where
    M: LearnerModel,
    <M as InferenceStep>::Output: ValidationOutput,
{
    /// The loaders are those that this has as prepared ones.
    fn fit(
        &self,
        mut components: TrainingComponents<M>,
        mut learner: Learner<M>,
        _: TrainLoader<M>,
        _: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        if let Err(error) = self.run(&mut components, &mut learner, starting_epoch) {
            // The program may live on, and the other ranks would wait for it.
            if !error.is_collective() && self.accelerator.world_size() > 1 {
                self.accelerator.group().abort(error.to_string());
            }
            components.interrupter.fail(DatasetError::new(error));
        }
        (learner.model(), components.event_processor)
    }
}

impl<M> ProcessStrategy<M>
where
    M: LearnerModel,
    <M as InferenceStep>::Output: ValidationOutput,
{
    fn run(
        &self,
        components: &mut TrainingComponents<M>,
        learner: &mut Learner<M>,
        starting_epoch: usize,
    ) -> Result<()> {
        let accelerator = &self.accelerator;
        if components.grad_accumulation.is_some() {
            return Err(Error::misuse(
                "`grads_accumulation(n)` adds up the gradients of n batches, whatever they hold: build the accelerator \
                 with `accumulation_steps(n)`, which averages over their samples",
            ));
        }
        let epochs = starting_epoch..=components.num_epochs;
        let told = format!("the epochs {} to {}", epochs.start(), epochs.end());
        agreement::check(accelerator.group(), "the training of a learner", &told)?;
        let units = accelerator.shared.reduction.settings.units;
        if units.are_sharded(&accelerator.shared.context) {
            return Err(Error::misuse(
                "a learner holds whole parameters, so the units of its model cannot be sharded: set `units` to `recompute`, \
                 which recomputes activations, or write the loop with `prepare` and `backward`",
            ));
        }
        unit::prepare_in_place(units, || learner.fork(&accelerator.device()));
        let model = accelerator.prepare(learner.model())?;
        learner.load_model(model.into_record());

        // Rank 0 alone has something to tell, to save, and to stop for.
        let is_main = accelerator.is_main_process();
        let mut checkpointer = components.checkpointer.take().filter(|_| is_main);
        let mut early_stopping = components.early_stopping.take().filter(|_| is_main);
        let is_read = checkpointer.is_some() || early_stopping.is_some();
        let mut events = EventSink {
            interrupter: components.interrupter.clone(),
            processor: is_main.then_some(&mut components.event_processor),
        };
        for epoch in epochs {
            if self.train_epoch(learner, epoch, &mut events)?.is_stop() {
                // As validation does: running statistics are each rank's own until then.
                accelerator.sync_buffers(&learner.model())?;
                break;
            }
            self.validate(learner, epoch, &mut events)?;
            events.train(LearnerEvent::EndEpoch(epoch));
            if is_read {
                events.flush();
            }
            let store = &components.event_store;
            let mut is_enough = || {
                let early = early_stopping.as_mut();
                early.is_some_and(|early| early.should_stop(epoch, store))
            };
            let mine = match events.verdict() {
                Verdict::Continue if is_enough() => Verdict::EarlyStopped,
                verdict => verdict,
            };
            let verdict = self.agree(mine, &events.interrupter)?;
            if let (Verdict::Continue | Verdict::EarlyStopped, Some(checkpointer)) =
                (&verdict, &mut checkpointer)
            {
                checkpointer.checkpoint(learner, epoch, store);
            }
            if verdict.is_stop() {
                break;
            }
        }
        Ok(())
    }

    fn train_epoch(
        &self,
        learner: &mut Learner<M>,
        epoch: usize,
        events: &mut EventSink<'_, M>,
    ) -> Result<Verdict> {
        let accelerator = &self.accelerator;
        let total = self.train.samples() as usize;
        events.train(start(epoch, total));
        let mut verdict = Verdict::Continue;
        for (step, batch) in self.train.epoch(epoch as u64 - 1).enumerate() {
            let (input, batch) = batch?.into_parts();
            let output = learner.train_step(input);
            if events.interrupter.should_stop() {
                accelerator.set_trigger();
            }
            let gradients = accelerator.average(output.grads, &learner.model(), &batch)?;
            let is_open = gradients.is_accumulating();
            if let Some(gradients) = gradients.into_params() {
                learner.lr_step();
                learner.optimizer_step(gradients);
            }
            if !batch.is_idle() {
                let progress = progress(batch.consumed(), total);
                let rate = Some(learner.lr_current());
                let item = TrainingItem::new(output.item, progress, Some(step + 1), rate);
                events.train(LearnerEvent::ProcessedItem(item));
            }
            if !is_open && accelerator.check_trigger()? {
                verdict = self.agree(events.verdict(), &events.interrupter)?;
                if verdict.is_stop() {
                    break;
                }
            }
        }
        events.train(LearnerEvent::EndSplit(epoch));
        Ok(verdict)
    }

    /// Each rank computes its share, and rank 0 hands on the outputs of all.
    fn validate(
        &self,
        learner: &Learner<M>,
        epoch: usize,
        events: &mut EventSink<'_, M>,
    ) -> Result<()> {
        let model = self.accelerator.valid(&learner.model())?;
        let total = self.valid.samples() as usize;
        events.valid(start(epoch, total));
        for (step, batch) in self.valid.eval().enumerate() {
            let (input, batch) = batch?.into_parts();
            let output = InferenceStep::step(&model, input).into_tensors();
            let output = self.accelerator.gather_output(output, &batch)?;
            let progress = progress(batch.consumed(), total);
            let output = ValidationOutput::from_tensors(output);
            let item = TrainingItem::new(output, progress, Some(step + 1), None);
            events.valid(LearnerEvent::ProcessedItem(item));
        }
        events.valid(LearnerEvent::EndSplit(epoch));
        Ok(())
    }

    /// Decides if training continues: the first rank with a reason to stop decides.
    fn agree(&self, mine: Verdict, interrupter: &Interrupter) -> Result<Verdict> {
        let all = self.accelerator.gather_object(&mine)?;
        let mut stops = (0..).zip(all).filter(|(_, verdict)| verdict.is_stop());
        let Some((rank, verdict)) = stops.next() else {
            return Ok(Verdict::Continue);
        };
        if !interrupter.should_stop() {
            match &verdict {
                Verdict::Continue | Verdict::EarlyStopped => {}
                Verdict::Interrupted(reason) => interrupter.stop(reason.as_deref()),
                Verdict::Failed(error) => {
                    let error = Error::other(format!("rank {rank} has failed: {error}"));
                    interrupter.fail(DatasetError::new(error));
                }
            }
        }
        Ok(verdict)
    }
}

#[derive(Deserialize, Eq, PartialEq, Serialize)]
enum Verdict {
    Continue,
    EarlyStopped,
    /// Interrupted, with the reason if the program gave one.
    Interrupted(Option<String>),
    Failed(String),
}

impl Verdict {
    fn is_stop(&self) -> bool {
        *self != Self::Continue
    }
}

struct EventSink<'a, M: LearnerModel> {
    interrupter: Interrupter,
    processor: Option<&'a mut SupervisedTrainingEventProcessor<M>>,
}

impl<M: LearnerModel> EventSink<'_, M> {
    fn train(&mut self, event: TrainEvent<M>) {
        self.tell(|processor| processor.process_train(event));
    }

    fn valid(&mut self, event: ValidEvent<M>) {
        self.tell(|processor| processor.process_valid(event));
    }

    fn flush(&mut self) {
        self.tell(EventProcessorTraining::flush);
    }

    fn tell(
        &mut self,
        tell: impl FnOnce(
            &mut SupervisedTrainingEventProcessor<M>,
        ) -> core::result::Result<(), EventProcessorError>,
    ) {
        if let Some(processor) = &mut self.processor {
            self.interrupter.fail_on_error(tell(processor));
        }
    }

    fn verdict(&self) -> Verdict {
        match (self.interrupter.error(), self.interrupter.interruption()) {
            (Some(error), _) => Verdict::Failed(error.to_string()),
            (None, Some(stop)) => Verdict::Interrupted(stop.reason),
            (None, None) => Verdict::Continue,
        }
    }
}

fn start<T>(epoch_number: usize, total_items: usize) -> LearnerEvent<T> {
    LearnerEvent::StartSplit {
        epoch_number,
        total_items,
    }
}

fn progress(consumed: u64, total: usize) -> Progress {
    Progress::new(consumed as usize, total, Some("items".to_owned()))
}

/// A model's output in validation, which can be joined with the rows of the other ranks for metrics that see all
/// samples. The outputs of burn-train implement it; a custom one names its tensors:
///
/// ```
/// use accelerator::learner::ValidationOutput;
/// use burn::tensor::{Int, Tensor};
///
/// struct Boxes {
///     loss: Tensor<1>,
///     corners: Tensor<3>,
///     classes: Tensor<2, Int>,
/// }
///
/// impl ValidationOutput for Boxes {
///     type Tensors = (Tensor<1>, Tensor<3>, Tensor<2, Int>);
///
///     fn into_tensors(self) -> Self::Tensors {
///         (self.loss, self.corners, self.classes)
///     }
///
///     fn from_tensors((loss, corners, classes): Self::Tensors) -> Self {
///         Self { loss, corners, classes }
///     }
/// }
/// ```
///
/// Tensors are joined along the first dimension, in which one has a row for each sample, or is about the batch, as a
/// loss of one element. The other dimensions are the same on all ranks: sequences are padded to one length.
pub trait ValidationOutput: Sized {
    /// The type of all its tensors together.
    type Tensors: Tensors;

    /// Takes it apart.
    fn into_tensors(self) -> Self::Tensors;

    /// Puts it together, of the rows of all ranks.
    fn from_tensors(tensors: Self::Tensors) -> Self;
}

macro_rules! outputs {
    ($($output:ident { $($tensor:ident: $kind:ty),+ })+) => {
        $(impl ValidationOutput for $output {
            type Tensors = ($($kind,)+);

            fn into_tensors(self) -> Self::Tensors {
                ($(self.$tensor,)+)
            }

            fn from_tensors(($($tensor,)+): Self::Tensors) -> Self {
                Self { $($tensor),+ }
            }
        })+
    };
}

outputs! {
    ClassificationOutput { loss: Tensor<1>, output: Tensor<2>, targets: Tensor<1, Int> }
    MultiLabelClassificationOutput { loss: Tensor<1>, output: Tensor<2>, targets: Tensor<2, Int> }
    RegressionOutput { loss: Tensor<1>, output: Tensor<2>, targets: Tensor<2> }
    SequenceOutput {
        loss: Tensor<1>,
        logits: Tensor<3>,
        predictions: Option<Tensor<2, Int>>,
        targets: Tensor<2, Int>
    }
}
