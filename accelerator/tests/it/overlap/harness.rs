//! Compares training with overlap and without.

use core::fmt::Display;

use accelerator::nn::Units;
use accelerator::optim::Sharded;
use accelerator::prelude::*;
use accelerator::{Compression, GradientReduction, Overlap, OverlapReport, OverlapState};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, TensorData};

use crate::common::known;

/// A call of `backward`.
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) rank: usize,
    pub(crate) step: usize,
}

impl Place {
    pub(crate) fn of(accelerator: &Accelerator, step: usize) -> Self {
        Self {
            device: accelerator.device(),
            rank: accelerator.rank(),
            step,
        }
    }

    /// Returns numbers that differ between ranks and steps.
    pub(crate) fn input<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let count: usize = shape.iter().product();
        let seed = (self.rank * 31 + self.step * 7) as f32;
        let values = (0..count).map(|i| ((i as f32) * 0.37 + seed).sin());
        let values = TensorData::new(values.collect::<Vec<f32>>(), shape);
        Tensor::from_data(values, &self.device.clone().inner())
    }

    /// Returns the size of the batch, which differs between ranks.
    pub(crate) fn rows(&self) -> usize {
        3 + self.rank
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) accumulation: usize,
    pub(crate) compression: Compression,
    /// Tells whether a rank has no samples.
    pub(crate) idle: fn(&Place) -> bool,
    pub(crate) kind: BackendKind,
    pub(crate) ranks: usize,
    pub(crate) steps: usize,
    pub(crate) units: Units,
}

impl Setting {
    pub(crate) fn new(kind: BackendKind) -> Self {
        Self {
            accumulation: 1,
            compression: Compression::None,
            idle: |_| false,
            kind,
            ranks: 2,
            steps: 6,
            units: Units::Plain,
        }
    }
}

/// The final state of a rank, bit for bit, and how its gradients were sent.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) parameters: Vec<TensorData>,
    pub(crate) losses: Vec<u64>,
    pub(crate) norms: Vec<u64>,
    pub(crate) report: OverlapReport,
}

/// The part of the optimizer's state, and so of the sums, that ranks keep.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Sharded,
    Whole,
}

/// The way in which gradients reach the other ranks, and whether they are clipped then.
#[derive(Clone, Copy, Debug)]
struct Way {
    overlap: Overlap,
    reduction: GradientReduction,
    clip: bool,
}

impl Way {
    const OFF: Self = Self {
        overlap: Overlap::Off,
        reduction: GradientReduction::Auto,
        clip: true,
    };

    const ON: Self = Self {
        overlap: Overlap::On,
        ..Self::OFF
    };

    /// Reduces as on a GPU.
    const STAGED: Self = Self {
        reduction: GradientReduction::Staged,
        ..Self::ON
    };

    fn without_clips(self) -> Self {
        Self {
            clip: false,
            ..self
        }
    }
}

fn run<M: Module + Display + 'static>(
    setting: Setting,
    way: Way,
    state: State,
    build: &(impl Fn(&Device) -> M + Sync),
    loss: &(impl Fn(&M, &Place) -> Tensor<1> + Sync),
) -> Vec<Outcome> {
    Accelerator::builder()
        .device(setting.kind)
        .bucket_size(1024)
        .accumulation_steps(setting.accumulation)
        .compression(setting.compression)
        .overlap(way.overlap)
        .gradient_reduction(way.reduction)
        .units(setting.units)
        .launch(setting.ranks, |accelerator| {
            let model = known(build(&accelerator.device()));
            let optimizer = AdamWConfig::new().init();
            let (mut model, mut optimizer) = match state {
                State::Whole => accelerator.prepare((model, optimizer))?,
                State::Sharded => accelerator.prepare((model, Sharded(optimizer)))?,
            };
            let (mut losses, mut norms) = (Vec::new(), Vec::new());
            for step in 0..setting.steps * setting.accumulation {
                let place = Place::of(&accelerator, step);
                let samples = if (setting.idle)(&place) {
                    0
                } else {
                    place.rows()
                };
                let gradients = accelerator.backward(loss(&model, &place), &model, samples)?;
                losses.extend(gradients.loss().map(f64::to_bits));
                let mut gradients = match way.clip {
                    true => gradients.clip_norm(0.5),
                    false => gradients,
                };
                norms.extend(gradients.norm().map(f64::to_bits));
                model = optimizer.step(0.05, model, gradients);
            }
            Ok(Outcome {
                parameters: parameters(&model),
                losses,
                norms,
                report: accelerator.overlap_report(&model)?,
            })
        })
        .unwrap()
}

/// Trains without overlap, and returns the trained parameters.
pub(crate) fn trained<M: Module + Display + 'static>(
    setting: Setting,
    build: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, &Place) -> Tensor<1> + Sync,
) -> Vec<TensorData> {
    let outcomes = run(setting, Way::OFF, State::Whole, &build, &loss);
    outcomes.into_iter().next().unwrap().parameters
}

/// Trains with overlap, without, and with a sharded optimizer, asserts that all have the same bits, and returns the
/// reports with overlap.
pub(crate) fn same_bits<M: Module + Display + 'static>(
    setting: Setting,
    build: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, &Place) -> Tensor<1> + Sync,
) -> Vec<OverlapReport> {
    let off = run(setting, Way::OFF, State::Whole, &build, &loss);
    let on = run(setting, Way::ON, State::Whole, &build, &loss);
    let parts = run(setting, Way::ON, State::Sharded, &build, &loss);
    assert!(!off[0].parameters.is_empty() && off[0].losses.len() == setting.steps);
    for outcome in off.iter().chain(&on).chain(&parts) {
        assert_eq!(outcome.parameters, off[0].parameters);
        assert_eq!(outcome.losses, off[0].losses);
        assert_eq!(outcome.norms, off[0].norms);
    }
    assert!(off.iter().all(|off| off.report.state == OverlapState::Off
        && off.report.early_total == 0
        && off.report.windows == 0));
    for (on, parts) in on.iter().zip(&parts) {
        let of = |outcome: &Outcome| (outcome.report.state, outcome.report.repairs);
        assert_eq!(of(parts), of(on));
    }
    staged_alike(setting, &build, &loss);
    on.into_iter().map(|outcome| outcome.report).collect()
}

/// Compares again with buckets that are tensors, as on a GPU. A device adds up squares in its own order, so clipping
/// has other bits there.
fn staged_alike<M: Module + Display + 'static>(
    setting: Setting,
    build: &(impl Fn(&Device) -> M + Sync),
    loss: &(impl Fn(&M, &Place) -> Tensor<1> + Sync),
) {
    let run = |way, state| run(setting, way, state, build, loss);
    let plain = run(Way::OFF.without_clips(), State::Whole);
    for state in [State::Whole, State::Sharded] {
        let staged = run(Way::STAGED.without_clips(), state);
        for (staged, plain) in staged.iter().zip(&plain) {
            assert_eq!(staged.parameters, plain.parameters);
            assert_eq!(staged.losses, plain.losses);
        }
    }
    let late = Way {
        overlap: Overlap::Off,
        ..Way::STAGED
    };
    let [late, early] = [late, Way::STAGED].map(|way| run(way, State::Whole));
    for outcome in late.iter().chain(&early) {
        assert_eq!(outcome.parameters, late[0].parameters);
        assert_eq!(outcome.losses, late[0].losses);
        assert_eq!(outcome.norms, late[0].norms);
    }
}

pub(crate) fn assert_on(reports: &[OverlapReport]) {
    for report in reports {
        assert_eq!(report.state, OverlapState::On, "{report:?}");
        assert!(
            report.early > 0 && report.early < report.buckets,
            "{report:?}"
        );
        assert_eq!(report.repairs, 0, "{report:?}");
        assert!(
            report.windows > 0 && report.early_total >= report.early as u64,
            "{report:?}"
        );
        assert!(
            report.early_total <= report.windows * report.buckets as u64,
            "{report:?}"
        );
    }
}

/// Returns the trained parameters, without the running statistics, which each rank has for itself.
pub(crate) fn parameters<M: Module + 'static>(model: &M) -> Vec<TensorData> {
    struct Reader(Vec<TensorData>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0.push(param.val().into_data());
            }
        }
    }
    let mut reader = Reader(Vec::new());
    model.visit(&mut reader);
    reader.0
}
