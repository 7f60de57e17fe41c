use std::sync::Arc;
use std::time::{Duration, Instant};

use accelerator::optim::Manual;
use accelerator::prelude::*;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder as PlainBuilder};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};

use crate::model::{Batch, Model, Net, Samples};

/// Learning is slow enough that both sides go on computing with numbers of the same size.
const RATE: f64 = 1e-5;

/// The same training twice: in plain Burn, and prepared. Each round is one epoch of either.
#[allow(missing_debug_implementations, reason = "Burn's loaders have none")]
pub struct Pair {
    accelerator: Accelerator,
    steps: usize,
    epoch: u64,
    /// `None` where a round has failed.
    models: Option<(Net, Net)>,
    plain: Plain,
    prepared: Prepared,
}

/// What a step took, in seconds, on average over a round.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// All of it.
    pub whole: f64,
    /// The part in `backward`: that of the loss in plain Burn, that of the accelerator else.
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
    /// Two networks, each with an optimizer and a loader whose epochs have so many steps on every
    /// rank.
    ///
    /// # Errors
    ///
    /// Those of [`Accelerator::prepare`].
    pub fn new(accelerator: &Accelerator, model: Model, steps: usize) -> Result<Self> {
        let (device, samples) = (accelerator.device(), model.samples());
        let share = steps * model.batch_size();
        let loader = LoaderBuilder::new(samples.batcher())
            .batch_size(model.batch_size())
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
                    .batch_size(model.batch_size())
                    .set_device(device.inner())
                    .build(Samples::dataset(share)),
            },
            prepared: Prepared { optimizer, loader },
        })
    }

    /// A round in plain Burn, on this rank alone.
    ///
    /// # Errors
    ///
    /// When a batch cannot be read, or an earlier round failed.
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

    /// A round of the prepared loop, together with the other ranks.
    ///
    /// # Errors
    ///
    /// Those of the accelerator, or when an earlier round failed.
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
