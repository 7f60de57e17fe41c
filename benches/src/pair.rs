use std::sync::Arc;
use std::time::{Duration, Instant};

use accelerator::optim::Manual;
use accelerator::prelude::*;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder as PlainBuilder};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};

use crate::model::{Batch, Model, Net, Samples};

/// The learning rate: so low that both sides keep computing with numbers of the same magnitude.
const RATE: f64 = 1e-5;

/// The same training twice, in plain Burn and prepared. A round is an epoch of either.
#[allow(missing_debug_implementations, reason = "Burn's loaders have none")]
pub struct Pair {
    accelerator: Accelerator,
    steps: usize,
    epoch: u64,
    /// `None` after a failed round.
    models: Option<(Net, Net)>,
    plain: Plain,
    prepared: Prepared,
}

/// The mean duration of a step in a round, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The whole step.
    pub whole: f64,
    /// The part in `backward`: of the loss in plain Burn, of the accelerator in the prepared loop.
    pub backward: f64,
}

struct Plain {
    optimizer: ModuleOptimizer,
    loader: Arc<dyn DataLoader<Batch>>,
}

struct Prepared {
    optimizer: PreparedOptimizer<Manual>,
    loader: PreparedLoader<Batch>,
}

impl Pair {
    /// Creates two networks, each with an optimizer and a loader with epochs of `steps` steps on every rank.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::prepare`].
    pub fn new(accelerator: &Accelerator, model: Model, steps: usize) -> Result<Self> {
        Self::with_rows(accelerator, model, None, steps)
    }

    /// The same, with batches of this many rows; see [`Model::batches`].
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::prepare`].
    pub fn with_rows(
        accelerator: &Accelerator,
        model: Model,
        rows: Option<usize>,
        steps: usize,
    ) -> Result<Self> {
        let device = accelerator.device();
        let (batch_size, samples) = model.batches(rows);
        let share = steps * batch_size;
        let loader = LoaderBuilder::new(samples.batcher())
            .batch_size(batch_size)
            .num_workers(0)
            .build(Samples::dataset(share * accelerator.world_size()));
        let parts = (model.init(&device), AdamWConfig::new().init(), loader);
        let (net, optimizer, loader) = accelerator.prepare(parts)?;
        Ok(Self {
            accelerator: accelerator.clone(),
            steps,
            epoch: 0,
            models: Some((model.init(&device), net)),
            plain: Plain {
                optimizer: AdamWConfig::new().init(),
                loader: PlainBuilder::new(samples.batcher())
                    .batch_size(batch_size)
                    .set_device(device.inner())
                    .build(Samples::dataset(share)),
            },
            prepared: Prepared { optimizer, loader },
        })
    }

    /// Runs a round in plain Burn, on this rank alone.
    ///
    /// # Errors
    ///
    /// If a batch cannot be read, or an earlier round failed.
    pub fn plain(&mut self) -> Result<Step, Box<dyn core::error::Error>> {
        let (mut model, other) = self.models.take().ok_or("an earlier round failed")?;
        let (start, mut backward) = (Instant::now(), Duration::ZERO);
        for batch in self.plain.loader.iter() {
            let loss = model.loss(&batch?);
            let begun = Instant::now();
            let gradients = loss.backward();
            backward += begun.elapsed();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = self.plain.optimizer.step(RATE, model, gradients);
        }
        self.models = Some((model, other));
        Ok(self.step(start.elapsed(), backward))
    }

    /// Runs a round of the prepared loop, together with the other ranks.
    ///
    /// # Errors
    ///
    /// The errors of the accelerator, and an error if an earlier round failed.
    pub fn prepared(&mut self) -> Result<Step, Box<dyn core::error::Error>> {
        let (other, mut model) = self.models.take().ok_or("an earlier round failed")?;
        let (start, mut backward) = (Instant::now(), Duration::ZERO);
        for batch in self.prepared.loader.epoch(self.epoch) {
            let batch = batch?;
            let loss = model.loss(&batch);
            let begun = Instant::now();
            let gradients = self.accelerator.backward(loss, &model, &batch)?;
            backward += begun.elapsed();
            model = self.prepared.optimizer.step(RATE, model, gradients);
        }
        self.models = Some((other, model));
        self.epoch += 1;
        Ok(self.step(start.elapsed(), backward))
    }

    fn step(&self, whole: Duration, backward: Duration) -> Step {
        let average = |time: Duration| time.as_secs_f64() / self.steps as f64;
        Step {
            whole: average(whole),
            backward: average(backward),
        }
    }
}
