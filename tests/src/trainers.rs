//! Trains networks of [`problems`](crate::problems) by arguments.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use accelerator::checkpoint::Saved;
use accelerator::prelude::*;
use accelerator::train::{
    CallbackContext, Inputs, Metrics, Trainer, TrainerCallback, TrainerControl, TrainingArguments,
};
use burn::data::dataset::InMemDataset;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Int, Tensor};

use serde::{Deserialize, Serialize};

use crate::problems::{Mlp, PictureBatcher, Pictures};

/// Logits and labels.
type Outputs = (Tensor<2>, Tensor<1, Int>);

/// The settings of a test that are not training arguments.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct TrainerJob {
    /// The probability of dropout, whose masks depend on the rank.
    pub dropout: f64,
    pub kills: Vec<Kill>,
    /// The pause after each update, in milliseconds.
    pub pause_ms: u64,
}

/// Makes a rank kill itself. `rank` is its rank in the first group.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Kill {
    pub rank: usize,
    pub point: KillPoint,
}

/// The callback in which a rank kills itself, and the number of updates before it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum KillPoint {
    Begin,
    Step(u64),
    Evaluation(u64),
    Save(u64),
    Epoch(u64),
}

/// Trains by a file of arguments, with a metric, and evaluations on samples that ranks cannot share evenly. Pushes the
/// result into a folder.
pub fn train(file: &Path, pushed: &Path, job: TrainerJob) -> Result<ExitCode> {
    let arguments = TrainingArguments::from_file(file)?;
    let accelerator = arguments
        .accelerator()
        .device(BackendKind::Flex)
        .runs_folder(pushed.with_file_name("runs"))
        .build()?;
    let dropout = job.dropout;
    let model = |device: &_| Mlp::new(device, 16, dropout);
    let mut trainer = Trainer::builder(arguments, model, PictureBatcher, mlp_loss)
        .accelerator(accelerator)
        .train_dataset(InMemDataset::new((0..97).collect()))
        .eval_dataset(InMemDataset::new((97..120).collect()))
        .compute_metrics(accuracy)
        .callback(job)
        .build()?;
    trainer.train()?;
    trainer.push(pushed)?;
    let accelerator = trainer.accelerator();
    let (restarts, ranks) = (accelerator.restarts(), accelerator.world_size());
    accelerator.print(format_args!("after {restarts} restarts, on {ranks} ranks"));
    trainer.finish()
}

impl TrainerJob {
    fn kill_if_due(&self, point: KillPoint) {
        // A replacement has the `RANK` of the lost process, and must not kill itself too.
        let joins = std::env::var("ACCEL_ELASTIC").is_ok_and(|word| word == "joining");
        let rank = std::env::var("RANK");
        let is_due = |kill: &Kill| {
            kill.point == point
                && rank
                    .as_ref()
                    .is_ok_and(|rank| *rank == kill.rank.to_string())
        };
        if !joins && self.kills.iter().any(is_due) {
            let pid = std::process::id().to_string();
            let status = Command::new("kill").args(["-KILL", &pid]).status();
            panic!("`kill -KILL` did not end this process: {status:?}");
        }
    }
}

impl<M> TrainerCallback<M> for TrainerJob {
    fn on_train_begin(
        &mut self,
        at: &CallbackContext<'_, M>,
        _: &mut TrainerControl,
    ) -> Result<()> {
        if at.state.global_step == 0 {
            self.kill_if_due(KillPoint::Begin);
        }
        Ok(())
    }

    fn on_step_end(&mut self, at: &CallbackContext<'_, M>, _: &mut TrainerControl) -> Result<()> {
        std::thread::sleep(Duration::from_millis(self.pause_ms));
        self.kill_if_due(KillPoint::Step(at.state.global_step));
        Ok(())
    }

    fn on_evaluate(
        &mut self,
        at: &CallbackContext<'_, M>,
        _: &Metrics,
        _: &mut TrainerControl,
    ) -> Result<()> {
        self.kill_if_due(KillPoint::Evaluation(at.state.global_step));
        Ok(())
    }

    fn on_save(
        &mut self,
        at: &CallbackContext<'_, M>,
        _: &Saved,
        _: &mut TrainerControl,
    ) -> Result<()> {
        self.kill_if_due(KillPoint::Save(at.state.global_step));
        Ok(())
    }

    fn on_epoch_end(&mut self, at: &CallbackContext<'_, M>, _: &mut TrainerControl) -> Result<()> {
        self.kill_if_due(KillPoint::Epoch(at.state.global_step));
        Ok(())
    }
}

pub(crate) fn mlp_loss(model: &Mlp, inputs: &Inputs<'_, Pictures>) -> (Tensor<1>, Outputs) {
    let logits = model.forward(inputs.pictures.clone());
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    let loss = loss.forward(logits.clone(), inputs.targets.clone());
    (loss, (logits, inputs.targets.clone()))
}

pub(crate) fn accuracy((logits, labels): Outputs) -> [(&'static str, f64); 1] {
    let right = logits.argmax(1).flatten::<1>(0, 1).equal(labels);
    [("accuracy", right.float().mean().into_scalar())]
}
