//! Overlap of communication with the backward pass.

use accelerator::prelude::*;
use accelerator::{Overlap, OverlapReport, OverlapState, Oversubscription};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};

use crate::common::{self, Column, columns};
use crate::harness::{Setting, State, is_there};

#[derive(Module, Debug)]
struct Net {
    convolution: Conv2d,
    norm: BatchNorm,
    hidden: Vec<Linear>,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            convolution: Conv2dConfig::new([1, 4], [1, 1]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            hidden: [(16, 300), (300, 1000), (1000, 300)]
                .map(|(inputs, outputs)| LinearConfig::new(inputs, outputs).init(device))
                .into(),
            output: LinearConfig::new(300, 1).init(device),
        }
    }

    /// Returns the squared distance from `3 x - 1`.
    fn distance(&self, batch: &Column) -> Tensor<1> {
        let samples = batch.values.dims()[0];
        let wanted = batch.values.clone() * 3.0 - 1.0;
        let image = batch
            .values
            .clone()
            .repeat_dim(1, 4)
            .reshape([samples, 1, 2, 2]);
        let features = relu(self.norm.forward(self.convolution.forward(image)));
        let mut hidden = features.flatten::<2>(1, 3);
        for layer in &self.hidden {
            hidden = relu(layer.forward(hidden));
        }
        MseLoss::new().forward(self.output.forward(hidden), wanted, Reduction::Mean)
    }
}

/// The trained values of a rank, bit for bit, and how the gradients of its last step were sent.
struct Outcome {
    /// Excludes running statistics, which each rank has for itself.
    trained: Vec<TensorData>,
    report: OverlapReport,
}

impl ModuleVisitor for Outcome {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.trained.push(param.val().into_data());
        }
    }
}

/// Trains two ranks for two epochs.
fn train(overlap: Overlap) -> Vec<Outcome> {
    Accelerator::builder()
        .device(BackendKind::Wgpu)
        .oversubscription(Oversubscription::Allow)
        .overlap(overlap)
        .bucket_size(1 << 18)
        .launch(2, |accelerator| {
            let train = LoaderBuilder::new(common::ColumnBatcher)
                .batch_size(4)
                .build(columns(24));
            let parts = (accelerator.init(Net::new), AdamWConfig::new().init(), train);
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            for epoch in 0..2 {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let loss = model.distance(&batch);
                    let gradients = accelerator.backward(loss, &model, &batch)?;
                    model = optimizer.step(0.01, model, gradients);
                }
            }
            let mut outcome = Outcome {
                trained: Vec::new(),
                report: accelerator.overlap_report(&model)?,
            };
            model.visit(&mut outcome);
            Ok(outcome)
        })
        .unwrap()
}

#[test]
fn two_ranks_get_the_same_with_and_without_overlap() {
    if !is_there() {
        return;
    }
    let [off, on] = [Overlap::Off, Overlap::On].map(train);
    // Not `assert_eq`, which would print every value.
    for outcomes in [&off, &on] {
        for Outcome { trained, report } in outcomes {
            assert!(*trained == outcomes[0].trained, "of every rank: {report:?}");
        }
    }
    if cfg!(feature = "fusion") {
        // Fusion depends on when buckets are read.
        let pairs = off[0].trained.iter().zip(&on[0].trained);
        for (off, on) in pairs.flat_map(|(off, on)| off.iter::<f32>().zip(on.iter::<f32>())) {
            assert!((off - on).abs() <= 1e-3, "{off}, {on}");
        }
    } else {
        assert!(on[0].trained == off[0].trained, "{:?}", on[0].report);
    }
    for Outcome { report, .. } in off {
        assert_eq!((report.state, report.early), (OverlapState::Off, 0));
    }
    for Outcome { report, .. } in on {
        assert_eq!(report.state, OverlapState::On);
        assert!(report.early > 0, "{report:?}");
        assert_eq!(report.repairs, 0, "{report:?}");
    }
}

#[test]
fn what_is_accumulated_and_missing_on_a_rank_is_sent_early_as_well() {
    if !is_there() {
        return;
    }
    for accumulation in [1, 2] {
        let off = Setting {
            accumulation,
            clip: |gradients| gradients.clip_norm(0.3),
            steps: 6,
            ..Setting::new(2)
        };
        let on = Setting {
            overlap: Overlap::On,
            ..off
        };
        let (late, early) = (off.run(), on.run());
        if cfg!(feature = "fusion") {
            // Fusion depends on when buckets are read, so even two runs of `on` differ: by 2e-8 in parameters and 2e-7
            // in norms.
            early.assert_near(&late, 1e-6);
        } else {
            assert!(late.parameters == early.parameters, "{:?}", early.report);
            assert_eq!(late.losses, early.losses);
            assert_eq!(late.norms, early.norms);
        }
        assert_eq!(early.report.state, OverlapState::On);
        assert!(early.report.early_total > 0, "{:?}", early.report);
        assert_eq!(early.report.repairs, 0, "{:?}", early.report);
        // A sharded optimizer takes parts of the sums, which go through memory.
        let parts = Setting {
            state: State::Sharded,
            ..on
        };
        let parts = parts.run();
        assert_eq!(parts.report.repairs, 0, "{:?}", parts.report);
        parts.assert_near(&early, 1e-4);
    }
}
