//! A training that is the same on any number of ranks and on any device.

use accelerator::optim::Sharded;
use accelerator::prelude::*;
use accelerator::{Compression, Overlap, OverlapReport, Oversubscription};
use burn::module::Module;
use burn::nn::Linear;
use burn::optim::SgdConfig;
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor, TensorData};

use crate::common::{flat, linear};

/// Samples of a micro-step, over all ranks.
pub(crate) const SAMPLES: usize = 7;

/// The number of samples that `extra` sees. It is smaller than rank 0's share of two, so rank 1 has no gradient of it.
const SEEN: usize = 3;

/// Returns true if there is a graphics device here, and prints a line if there is none.
pub(crate) fn is_there() -> bool {
    match Accelerator::builder().device(BackendKind::Wgpu).build() {
        Ok(_) => true,
        Err(error) => {
            assert!(error.is_device(), "{error:?}");
            eprintln!("skipped, since there is no graphics device here: {error}");
            false
        }
    }
}

/// Returns the CPU to compare with, and prints a line if it is not compiled in.
pub(crate) fn cpu() -> Option<BackendKind> {
    let cpu = Some(BackendKind::Flex).filter(|kind| kind.is_compiled_in());
    if cpu.is_none() {
        eprintln!("not compared with the CPU, since `flex` is not compiled in");
    }
    cpu
}

#[derive(Module, Debug)]
pub(crate) struct Net {
    first: Linear,
    hidden: Vec<Linear>,
    last: Linear,
    extra: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: linear(2, 24, device),
            hidden: (0..3).map(|_| linear(24, 24, device)).collect(),
            last: linear(24, 1, device),
            extra: linear(2, 1, device),
        }
    }

    /// Returns the mean squared distance of these samples of a micro-step.
    fn distance(&self, samples: Samples, accelerator: &Accelerator) -> Tensor<1> {
        let (input, wanted) = samples.tensors(&accelerator.device());
        let input = accelerator.to_working(input);
        let mut hidden = tanh(self.first.forward(input.clone()));
        for layer in &self.hidden {
            hidden = tanh(layer.forward(hidden));
        }
        let mut output = self.last.forward(hidden);
        let seen = SEEN.saturating_sub(samples.from).min(samples.count);
        if seen > 0 {
            let extra = self.extra.forward(input.slice(0..seen));
            let rest = output.clone().slice(seen..samples.count);
            output = match samples.count - seen {
                0 => output + extra,
                _ => Tensor::cat(vec![output.slice(0..seen) + extra, rest], 0),
            };
        }
        (accelerator.to_full(output) - wanted).powi_scalar(2).mean()
    }
}

/// The samples that a rank has in a micro-step.
#[derive(Clone, Copy)]
struct Samples {
    micro_step: usize,
    from: usize,
    count: usize,
}

impl Samples {
    /// Rank 0 of two has more samples than rank 1, and in some micro-steps all of them.
    fn of(rank: usize, ranks: usize, micro_step: usize) -> Self {
        let border = if micro_step % 4 == 2 { SAMPLES } else { 4 };
        let (from, to) = match (ranks, rank) {
            (1, _) => (0, SAMPLES),
            (2, 0) => (0, border),
            _ => (border, SAMPLES),
        };
        Self {
            micro_step,
            from,
            count: to - from,
        }
    }

    fn tensors(self, device: &Device) -> (Tensor<2>, Tensor<2>) {
        let number = |sample| ((self.micro_step % 10 * SAMPLES + sample) as f32 * 0.37).sin();
        let samples = self.from..self.from + self.count;
        let input: Vec<f32> = samples
            .clone()
            .flat_map(|sample| [number(sample), number(sample).abs() - 0.5])
            .collect();
        let wanted: Vec<f32> = samples
            .map(|sample| 1.5 * number(sample) * number(sample) - 0.7)
            .collect();
        let tensor = |values, width| {
            let data = TensorData::new(values, [self.count, width]);
            Tensor::from_data(data, &device.clone().inner())
        };
        (tensor(input, 2), tensor(wanted, 1))
    }
}

/// The part of the optimizer's state that ranks keep.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    Sharded,
    Whole,
}

/// When the loss of a step is read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reading {
    EachStep,
    LastStep,
}

#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) accumulation: usize,
    pub(crate) clip: fn(AveragedGradients) -> AveragedGradients,
    pub(crate) compression: Compression,
    pub(crate) kind: BackendKind,
    pub(crate) overlap: Overlap,
    pub(crate) precision: Precision,
    pub(crate) ranks: usize,
    pub(crate) rate: f64,
    pub(crate) reading: Reading,
    pub(crate) state: State,
    pub(crate) steps: usize,
}

impl Setting {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            accumulation: 1,
            clip: |gradients| gradients,
            compression: Compression::None,
            kind: BackendKind::Wgpu,
            overlap: Overlap::Off,
            precision: Precision::No,
            ranks,
            rate: 0.2,
            reading: Reading::EachStep,
            state: State::Whole,
            steps: 8,
        }
    }

    /// Trains, and returns the outcome, which is the same bit for bit on all ranks.
    pub(crate) fn run(self) -> Outcome {
        let mut outcomes = self.try_run().unwrap();
        for outcome in &outcomes {
            // Not `assert_eq`, which would print every value.
            assert!(outcome.parameters == outcomes[0].parameters);
            assert_eq!(outcome.losses, outcomes[0].losses);
            assert_eq!(outcome.norms, outcomes[0].norms);
        }
        outcomes.swap_remove(0)
    }

    pub(crate) fn try_run(self) -> Result<Vec<Outcome>, Error> {
        Accelerator::builder()
            .device(self.kind)
            .oversubscription(Oversubscription::Allow)
            .accumulation_steps(self.accumulation)
            .bucket_size(2048)
            .precision(self.precision)
            .compression(self.compression)
            .overlap(self.overlap)
            .launch(self.ranks, |accelerator| self.train(&accelerator))
    }

    fn train(self, accelerator: &Accelerator) -> Result<Outcome, Error> {
        let (model, sgd) = (Net::new(&accelerator.device()), SgdConfig::new().init());
        let (mut model, mut optimizer) = match self.state {
            State::Whole => accelerator.prepare((model, sgd))?,
            State::Sharded => accelerator.prepare((model, Sharded(sgd)))?,
        };
        let (mut losses, mut norms, mut skipped) = (Vec::new(), Vec::new(), 0);
        for micro_step in 0..self.steps * self.accumulation {
            let samples = Samples::of(accelerator.rank(), accelerator.world_size(), micro_step);
            // A rank without samples computes with another rank's.
            let shown = match samples.count {
                0 => Samples::of(0, 1, micro_step),
                _ => samples,
            };
            let loss = accelerator.forward(&model, |model| model.distance(shown, accelerator));
            let gradients = accelerator.backward(loss, &model, samples.count)?;
            let mut gradients = (self.clip)(gradients);
            norms.extend(gradients.norm());
            let last = micro_step + 1 == self.steps * self.accumulation;
            if self.reading == Reading::EachStep || last {
                losses.extend(gradients.loss());
            }
            model = optimizer.step(self.rate, model, gradients);
            let outcome = optimizer.outcome();
            skipped += usize::from(matches!(outcome, StepOutcome::Skipped { .. }));
        }
        Ok(Outcome {
            parameters: flat(&model),
            losses,
            norms,
            skipped,
            report: accelerator.overlap_report(&model)?,
        })
    }
}

/// The state of a rank after training.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) parameters: Vec<f32>,
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) skipped: usize,
    pub(crate) report: OverlapReport,
}

/// Asserts that numbers differ by at most `bound`, relative to their size. Small numbers are compared as if they had
/// the size of a layer's weights.
#[track_caller]
pub(crate) fn assert_near(ours: &[f64], theirs: &[f64], bound: f64) {
    assert_eq!(ours.len(), theirs.len());
    for (at, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let scale = theirs.abs().max(0.3);
        assert!(
            (ours - theirs).abs() <= bound * scale,
            "{at}: {ours} is not {theirs} to {bound}"
        );
    }
}

impl Outcome {
    /// Returns the mean loss of the first ten steps and of the last ten.
    pub(crate) fn ends(&self) -> (f64, f64) {
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let losses = &self.losses;
        (mean(&losses[..10]), mean(&losses[losses.len() - 10..]))
    }

    /// Asserts that another training had about the same outcome.
    #[track_caller]
    pub(crate) fn assert_near(&self, other: &Self, bound: f64) {
        let wide = |values: &[f32]| {
            values
                .iter()
                .map(|&value| value.into())
                .collect::<Vec<f64>>()
        };
        assert_near(&self.losses, &other.losses, bound);
        assert_near(&self.norms, &other.norms, bound);
        assert_near(&wide(&self.parameters), &wide(&other.parameters), bound);
    }
}
