//! Batch normalisation over the batches of all ranks.

use crate::common::{Column, assert_chain, assert_error, devices};
use crate::values;
use accelerator::metric::Mean;
use accelerator::nn::SyncBatchNorm;
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, OverlapState};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::activation::relu;
use burn::tensor::{FloatDType, Tensor};

#[derive(Debug, Module)]
struct Net {
    input: Linear,
    norm: SyncBatchNorm,
    output: Linear,
}

impl Net {
    fn new(accelerator: &Accelerator) -> Self {
        Self {
            // The gradient of a bias before a normalisation is only rounding.
            input: accelerator.init(|device| LinearConfig::new(3, 6).with_bias(false).init(device)),
            norm: SyncBatchNorm::of(
                BatchNormConfig::new(6).init(&accelerator.device()),
                accelerator,
            ),
            output: accelerator.init(|device| LinearConfig::new(6, 1).init(device)),
        }
    }

    fn loss(&self, batch: &Batch<Column>) -> Tensor<1> {
        let hidden = self
            .norm
            .forward(self.input.forward(features(batch.values.clone())), batch);
        let found = self.output.forward(relu(hidden));
        let wanted = batch.values.clone().powi_scalar(2) * 3.0 - 1.0;
        (found - wanted).powi_scalar(2).mean()
    }
}

/// Returns several features, since the gradient of the scale before a normalisation is only rounding, and there must be
/// more than a scale to learn.
fn features(values: Tensor<2>) -> Tensor<2> {
    Tensor::cat(
        vec![values.clone(), values.clone().powi_scalar(2), values.sin()],
        1,
    )
}

/// Returns a builder in f64, since a process computes in one precision.
fn double() -> AcceleratorBuilder {
    Accelerator::builder().dtype(FloatDType::F64)
}

/// Trains three epochs over 25 samples, in steps of 6 with a last step of 1. With several ranks, some are idle then.
fn train(kind: BackendKind, ranks: usize, overlap: Overlap, steps: usize) -> Vec<f64> {
    let builder = double()
        .device(kind)
        .seed(3)
        .accumulation_steps(steps)
        .overlap(overlap);
    let outcomes = builder.launch(ranks, |accelerator| {
        let train = LoaderBuilder::new(crate::common::ColumnBatcher)
            .global_batch_size(6)
            .shuffle(5)
            .build(crate::common::columns(25));
        let parts = (Net::new(&accelerator), SgdConfig::new().init(), train);
        let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
        for epoch in 0..3 {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let gradients = accelerator.backward(model.loss(&batch), &model, &batch)?;
                model = optimizer.step(0.05, model, gradients.clip_norm(1.0));
            }
        }
        if ranks > 1 {
            let report = accelerator.overlap_report(&model)?;
            let expected = match overlap {
                Overlap::On => OverlapState::GivesWay,
                _ => OverlapState::Off,
            };
            assert_eq!(report.state, expected);
        }
        Ok(values(&model.valid()))
    });
    let outcomes = outcomes.unwrap();
    for outcome in &outcomes {
        assert_eq!(*outcome, outcomes[0]);
    }
    outcomes.into_iter().next().unwrap()
}

#[test]
fn any_number_of_ranks_trains_what_one_does() {
    for kind in devices() {
        for steps in [1, 2] {
            let one = train(kind, 1, Overlap::Auto, steps);
            for ranks in [2, 3, 4] {
                let several = train(kind, ranks, Overlap::On, steps);
                for (several, one) in several.iter().zip(&one) {
                    let difference = (several - one).abs();
                    assert!(
                        difference < 1e-12,
                        "{kind}, {ranks} ranks: {one} became {several}"
                    );
                }
                assert_eq!(several, train(kind, ranks, Overlap::Off, steps));
            }
        }
    }
}

#[test]
fn alone_it_is_burns() {
    let accelerator = double().build().unwrap();
    let device = accelerator.device();
    let burns: BatchNorm = BatchNormConfig::new(3).with_momentum(0.3).init(&device);
    let ours = SyncBatchNorm::of(
        BatchNormConfig::new(3).with_momentum(0.3).init(&device),
        &accelerator,
    );
    let input = common_input(&device);
    let [one, other] = [burns.forward(input.clone()), ours.forward(input.clone(), 4)];
    assert_eq!(one.into_data(), other.into_data());
    assert_eq!(values(&burns.valid()), values(&ours.valid()));
    let plain = input.inner();
    let [one, other] = [
        burns.valid().forward(plain.clone()),
        ours.valid().forward(plain, 4),
    ];
    assert_eq!(one.into_data(), other.into_data());
}

fn common_input(device: &burn::tensor::Device) -> Tensor<3> {
    Tensor::<1, burn::tensor::Int>::arange(0..24, device)
        .float()
        .reshape([4, 3, 2])
        .sin()
}

#[test]
fn a_rank_that_is_lost_in_forward_is_named_by_backward() {
    let outcomes = double().launch(2, |accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator))?;
        if accelerator.rank() == 1 {
            accelerator.group().abort("its disk is full");
            return Ok(None);
        }
        let train = crate::common::loader(4, 4);
        let train = double().build()?.prepare(train)?;
        let batch = train.epoch(0).next().unwrap()?;
        Ok(accelerator
            .backward(model.loss(&batch), &model, &batch)
            .err())
    });
    let outcomes = outcomes.unwrap();
    let error = outcomes[0].as_ref().unwrap();
    assert!(error.is_peer_lost(), "{error:?}");
    assert_eq!(error.culprit().unwrap().rank(), 1);
}

#[test]
fn what_counts_for_nothing_on_all_ranks_leaves_no_trace() {
    for ranks in [1, 2] {
        let outcomes = double().launch(ranks, |accelerator| {
            let device = accelerator.device();
            let norm = BatchNormConfig::new(3).init(&device);
            let norm = accelerator.prepare(SyncBatchNorm::of(norm, &accelerator))?;
            let before = values(&norm.valid());
            norm.forward(common_input(&device), 0);
            let after = values(&norm.valid());
            norm.forward(common_input(&device), 4);
            Ok((before == after, values(&norm.valid()) == after))
        });
        assert!(outcomes.unwrap().iter().all(|seen| *seen == (true, false)));
    }
}

/// If only one rank runs a training forward, there are no other ranks to normalise with.
#[test]
fn a_forward_where_a_rank_is_alone_changes_nothing_and_backward_says_so() {
    let outcomes = double().launch(2, |accelerator| {
        let train = LoaderBuilder::new(crate::common::ColumnBatcher)
            .batch_size(2)
            .build(crate::common::columns(8));
        let (model, train) = accelerator.prepare((Net::new(&accelerator), train))?;
        let batch = train.epoch(0).next().unwrap()?;
        let before = values(&model.valid());
        let refused = |error: Error| {
            let words = ["`SyncBatchNorm`", "one rank only"];
            assert_chain(&error, Error::is_misuse, &words);
        };
        let backward = || accelerator.backward(model.loss(&batch), &model, &batch);
        if let Some(outcome) = accelerator.on_main_process(backward) {
            refused(outcome.unwrap_err());
        }
        assert_eq!(values(&model.valid()), before);
        // The forward itself cannot return the error, so the next call does, once.
        if let Some(loss) = accelerator.on_main_process(|| model.loss(&batch)) {
            assert_eq!(values(&model.valid()), before);
            refused(accelerator.backward(loss, &model, &batch).unwrap_err());
        }
        let gradients = backward()?;
        assert_eq!(gradients.samples(), Some(4.0));
        Ok((values(&model.valid()), before))
    });
    let outcomes = outcomes.unwrap();
    assert_ne!(outcomes[0].0, outcomes[0].1);
    assert_eq!(outcomes[0], outcomes[1]);
}

/// A call after a forward that one rank makes alone, which would use its results.
type Use = fn(&Accelerator, &Net, &std::path::Path) -> Result<()>;

#[test]
fn what_a_forward_without_the_others_gives_is_neither_saved_nor_evaluated() {
    let save: Use = |accelerator, model, folder| accelerator.save_state(folder, model).map(drop);
    let export: Use = |accelerator, model, folder| {
        accelerator.save_model(model, folder.join("model.safetensors"))
    };
    let evaluate: Use = |accelerator, model, _| accelerator.valid(model).map(drop);
    let measure: Use = |accelerator, _, _| accelerator.reduce_metric(Mean::of(1.0, 2)).map(drop);
    let gather: Use = |accelerator, _, _| {
        let answers = Tensor::<1>::ones([2], &accelerator.device());
        accelerator.gather(answers).map(drop)
    };
    let finish: Use = |accelerator, _, _| accelerator.finish();
    for (name, then) in [
        ("save", save),
        ("export", export),
        ("evaluate", evaluate),
        ("measure", measure),
        ("gather", gather),
        ("finish", finish),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let outcomes = double().launch(2, |accelerator| {
            let model = accelerator.prepare(Net::new(&accelerator))?;
            let input = Tensor::<2>::ones([4, 6], &accelerator.device());
            if let Some(output) = accelerator.on_main_process(|| model.norm.forward(input, 4)) {
                let values = output.into_data();
                assert!(values.iter::<f64>().all(f64::is_nan), "{values:?}");
            }
            Ok(then(&accelerator, &model, folder.path()).err())
        });
        let outcomes = outcomes.unwrap();
        let error = outcomes[0].as_ref().expect(name);
        assert_error(error, Error::is_misuse, &["`SyncBatchNorm`"]);
        if name == "save" {
            let error = outcomes[1].as_ref().unwrap();
            assert!(error.is_misuse(), "told to all: {error:?}");
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "{name}");
    }
}

/// The check holds in the middle of a window too, where nothing else is sent.
#[test]
fn no_gradient_is_taken_from_activations_without_the_others() {
    for leaves in ["before forward", "before backward"] {
        let builder = double().accumulation_steps(2);
        let outcomes = builder.launch(2, |accelerator| {
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .batch_size(2)
                .build(crate::common::columns(8));
            let (model, train) = accelerator.prepare((Net::new(&accelerator), train))?;
            let batch = train.epoch(0).next().unwrap()?;
            let fails = accelerator.rank() == 1;
            if fails && leaves == "before forward" {
                accelerator.group().abort("its disk is full");
                return Ok(None);
            }
            let loss = model.loss(&batch);
            if fails {
                accelerator.group().abort("its disk is full");
                return Ok(None);
            }
            if leaves == "before forward" {
                assert!(loss.clone().into_scalar::<f64>().is_nan());
            }
            let error = accelerator.backward(loss, &model, &batch).err();
            // The group cannot be used again.
            assert!(
                accelerator
                    .backward(model.loss(&batch), &model, &batch)
                    .is_err()
            );
            Ok(error)
        });
        let outcomes = outcomes.unwrap();
        let error = outcomes[0].as_ref().expect(leaves);
        assert!(error.is_peer_lost(), "{leaves}: {error:?}");
        assert_eq!(error.culprit().unwrap().rank(), 1);
    }
}
