//! Models whose units are sharded train to the bits of those whose units are recomputed.

use std::path::Path;

use crate::common::{
    Column, ColumnBatcher, assert_contains, assert_error, columns, connected, devices,
    folder_in_memory, known, known_within,
};
use accelerator::collective::Launch;
use accelerator::hook::PowerSgd;
use accelerator::model::{FileLayout, LoadOptions, SaveOptions};
use accelerator::nn::{Unit, Units, recompute};
use accelerator::optim::{InitFused, Manual, PreparedOptimizer, Sharded};
use accelerator::train::{FsdpStrategy, TrainingArguments};
use accelerator::{AcceleratorBuilder, Clip, prelude::*};
use burn::module::{Lora, Module, ModuleMapper, Param, QLora, Quantizer};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::gelu;
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Tensor};

/// A block whose `wide` is cut among up to three ranks. Its other parameters live on one rank each.
#[derive(Debug, Module)]
struct Block {
    /// A matrix that Burn transposes when it is initialized.
    narrow: Linear,
    norm: BatchNorm,
    wide: Linear,
    frozen: Linear,
    inner: Unit<Linear>,
}

#[derive(Debug, Module)]
pub(crate) struct Net {
    input: Linear,
    blocks: Vec<Unit<Block>>,
    /// One layer, twice.
    tied: Unit<[Linear; 2]>,
    /// A unit that no loss depends on.
    unused: Unit<Linear>,
    output: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        Self::within(0.3, device)
    }

    /// Returns one with other values.
    fn within(distance: f32, device: &Device) -> Self {
        let linear =
            |inputs, outputs| -> Linear { LinearConfig::new(inputs, outputs).init(device) };
        let block = || {
            Unit::new(Block {
                narrow: LinearConfig::new(8, 120)
                    .with_layout(LinearLayout::Col)
                    .init(device),
                norm: BatchNormConfig::new(120).init(device),
                wide: LinearConfig::new(120, 120)
                    .with_layout(LinearLayout::Col)
                    .init(device),
                frozen: linear(120, 8).no_grad(),
                inner: Unit::new(linear(8, 8)),
            })
        };
        let mut net = known_within(
            distance,
            Self {
                input: linear(1, 8),
                blocks: (0..2).map(|_| block()).collect(),
                tied: Unit::new([linear(8, 8), linear(8, 8)]),
                unused: Unit::new(linear(3, 3)),
                output: linear(8, 1),
            },
        );
        let tied = known_within(distance, linear(8, 8));
        net.tied = Unit::new([tied.clone(), tied]);
        net
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = gelu(self.input.forward(x));
        for block in &self.blocks {
            x = block.run(x, |block, x| {
                let y = accelerator::precision::in_full(block.narrow.forward(x.clone()), |x| {
                    block.norm.forward(x)
                });
                let y = gelu(block.wide.forward(gelu(y)));
                let y = block.frozen.forward(y);
                x + block.inner.run(y, |inner, y| inner.forward(y))
            });
        }
        let x = self
            .tied
            .run([x], |[one, other], [x]| other.forward(gelu(one.forward(x))));
        self.output.forward(x)
    }

    fn loss(&self, accelerator: &Accelerator, batch: &Column) -> Tensor<1> {
        let x = accelerator.to_working(batch.values.clone());
        let y = accelerator.forward(self, |model| accelerator.to_full(model.forward(x)));
        (y - batch.values.clone() * 3.0).powi_scalar(2).mean()
    }
}

pub(crate) fn adam() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.01).init_fused()
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Course {
    Plain,
    Clipped,
    /// Is clipped, and steps by SGD. Biases in front of a batch norm have no gradient but rounding, which Adam would turn
    /// into steps of full length.
    ClippedSgd,
    ClippedByOtherNorms,
    ClippedByValue,
    Ema,
    /// Continues from a checkpoint after the first epoch.
    Resumed,
    /// Continues from a checkpoint that has the optimizer before the model.
    ResumedInOtherOrder,
    /// Is prepared again, and saved and loaded, after the first epoch.
    Reloaded,
}

impl Course {
    pub(crate) const ALL: [Self; 8] = [
        Self::Plain,
        Self::Clipped,
        Self::ClippedByOtherNorms,
        Self::ClippedByValue,
        Self::Ema,
        Self::Resumed,
        Self::ResumedInOtherOrder,
        Self::Reloaded,
    ];
}

/// Trains for two epochs of batches that are not a multiple of the ranks; returns the losses and norms, and the model
/// and its evaluation.
fn train(accelerator: &Accelerator, folder: &Path, course: Course) -> Result<Trained> {
    let loader = LoaderBuilder::new(ColumnBatcher).batch_size(3).shuffle(1);
    let optimizer = match course {
        Course::ClippedSgd => SgdConfig::new().init_fused(),
        _ => adam(),
    };
    let parts = (
        Net::new(&accelerator.device()),
        optimizer,
        loader.build(columns(22)),
    );
    let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
    let mut ema = Ema::new(&model, 0.9);
    let mut figures = Vec::new();
    for epoch in 0..2 {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = model.loss(accelerator, &batch);
            let mut gradients = accelerator.backward(loss, &model, &batch)?;
            figures.extend(gradients.loss());
            gradients = match course {
                Course::Clipped | Course::ClippedSgd => gradients.clip_norm(0.1),
                Course::ClippedByValue => gradients.clip_value(0.05),
                Course::ClippedByOtherNorms => {
                    let largest = gradients.clip(Clip::norm(0.1).of_order(f64::INFINITY));
                    largest.clip(
                        Clip::norm(0.3)
                            .of_order(1.0)
                            .only(|path| path.contains("wide")),
                    )
                }
                _ => gradients,
            };
            model = optimizer.step(0.01, model, gradients);
            if let StepOutcome::Stepped { norm, .. } = optimizer.outcome() {
                figures.extend(norm);
            }
            ema.update(&model);
        }
        if course == Course::Resumed && epoch == 0 {
            let (kept, again) = (folder.join("kept"), folder.join("again"));
            let held = optimizer.state_memory()?;
            accelerator.save_state(&kept, (&model, &optimizer, &ema))?;
            // The second time, what was resumed is saved before it steps.
            for (from, to) in [(&kept, Some(&again)), (&again, None)] {
                let new = accelerator.prepare((Net::new(&accelerator.device()), adam()))?;
                let average = Ema::new(&new.0, 0.9);
                ((model, optimizer, ema), _) = accelerator.resume(from, (new.0, new.1, average))?;
                assert_eq!(optimizer.state_memory()?, held);
                if let Some(to) = to {
                    accelerator.save_state(to, (&model, &optimizer, &ema))?;
                }
            }
        }
        if course == Course::ResumedInOtherOrder && epoch == 0 {
            let kept = folder.join("kept");
            accelerator.save_state(&kept, (&optimizer, &model))?;
            let new = accelerator.prepare((adam(), Net::new(&accelerator.device())))?;
            ((optimizer, model), _) = accelerator.resume(&kept, new)?;
        }
        if course == Course::Reloaded && epoch == 0 {
            model = accelerator.prepare(model)?;
            let file = folder.join("reloaded.safetensors");
            accelerator.save_model(&model, &file)?;
            model = accelerator.load_model(model, &file)?;
            let options = SaveOptions::new().with_layout(FileLayout::PyTorch);
            accelerator.save_model_with(&model, &file, &options)?;
            model = accelerator.load_model(model, &file)?;
            let other = accelerator.prepare(Net::within(0.5, &accelerator.device()))?;
            let other = accelerator.load_model(other, &file)?;
            let copy = folder.join("copy.safetensors");
            accelerator.save_model_with(&other, &copy, &options)?;
            accelerator.wait_for_everyone()?;
            assert!(std::fs::read(&copy)? == std::fs::read(&file)?);
        }
    }
    let x = Tensor::<2>::ones([4, 1], &accelerator.device().inner());
    let evaluated = model.valid().forward(x).into_data().try_to_vec().unwrap();
    let file = folder.join("model.safetensors");
    match course {
        Course::Ema | Course::Resumed => accelerator.save_model(ema.model(), &file)?,
        _ => accelerator.save_model(&model, &file)?,
    }
    accelerator.wait_for_everyone()?;
    Ok(Trained {
        figures,
        evaluated,
        file: std::fs::read(&file)?,
    })
}

#[derive(Clone, PartialEq)]
pub(crate) struct Trained {
    figures: Vec<f64>,
    evaluated: Vec<f32>,
    file: Vec<u8>,
}

/// Returns what each rank has.
pub(crate) fn of_ranks(builder: AcceleratorBuilder, ranks: usize, course: Course) -> Vec<Trained> {
    let folder = folder_in_memory();
    let outcomes = builder.launch(ranks, |accelerator| {
        train(&accelerator, folder.path(), course)
    });
    outcomes.unwrap()
}

#[track_caller]
pub(crate) fn assert_same(found: &[Trained], expected: &[Trained], case: &str) {
    assert_eq!(found.len(), expected.len(), "{case}");
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.figures, expected.figures, "{case}");
        assert_eq!(found.evaluated, expected.evaluated, "{case}");
        assert!(found.file == expected.file, "{case}: other weights");
        assert!(
            found.evaluated.iter().all(|value| value.is_finite()),
            "{case}"
        );
    }
}

#[test]
fn a_training_has_the_same_bits_if_units_are_sharded() {
    for kind in devices() {
        for ranks in [1, 2, 3] {
            for course in Course::ALL {
                let outcome = |units| {
                    let builder = Accelerator::builder().device(kind).bucket_size(1024);
                    of_ranks(builder.units(units), ranks, course)
                };
                let expected = outcome(Units::Recompute);
                let case = format!("{kind}, {ranks} ranks, {course:?}");
                assert_same(&outcome(Units::Shard), &expected, &case);
            }
        }
    }
}

#[test]
fn a_training_over_connections_has_the_same_bits_if_units_are_sharded() {
    let outcome = |units| {
        let folder = folder_in_memory();
        let ranks = connected(
            3,
            |place| place,
            |_, builder| {
                let builder = builder.device(devices().next()).units(units);
                let accelerator = builder.build()?;
                let trained = train(&accelerator, folder.path(), Course::Clipped)?;
                accelerator.finish()?;
                Ok(trained)
            },
        );
        ranks.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    assert_same(
        &outcome(Units::Shard),
        &outcome(Units::Recompute),
        "connections",
    );
}

#[test]
fn a_training_in_half_precision_has_the_same_bits_if_units_are_sharded() {
    for precision in [Precision::Bf16, Precision::F16] {
        let outcome = |units| {
            let builder = Accelerator::builder()
                .device(BackendKind::Flex)
                .units(units);
            of_ranks(builder.precision(precision), 3, Course::Clipped)
        };
        let (found, expected) = (outcome(Units::Shard), outcome(Units::Recompute));
        assert_same(&found, &expected, &precision.to_string());
    }
}

/// Gradients of units are summed over the ranks in each micro-step, not in the last one: the last bits may differ.
#[test]
fn a_training_with_accumulation_is_close_if_units_are_sharded() {
    let outcome = |units| {
        let builder = Accelerator::builder().device(devices().next());
        of_ranks(
            builder.accumulation_steps(2).units(units),
            3,
            Course::ClippedSgd,
        )
    };
    let (found, expected) = (outcome(Units::Shard), outcome(Units::Recompute));
    assert_eq!(found[0].figures.len(), expected[0].figures.len());
    for (found, expected) in found[0].figures.iter().zip(&expected[0].figures) {
        let distance = (found - expected).abs() / expected.abs().max(1.0);
        assert!(distance < 1e-5, "{found}, {expected}");
    }
}

/// Continues a training in the middle of an epoch, with this number of ranks.
fn continued(folder: &Path, ranks: usize, units: Units, steps: usize) -> Vec<Trained> {
    let builder = Accelerator::builder().device(devices().next()).units(units);
    let outcomes = builder.launch(ranks, |accelerator| {
        let kept = folder.join("kept");
        let loader = LoaderBuilder::new(ColumnBatcher)
            .batch_size(12 / ranks)
            .shuffle(1);
        let parts = (
            Net::new(&accelerator.device()),
            adam(),
            loader.build(columns(240)),
        );
        let mut parts = accelerator.prepare(parts)?;
        if kept.exists() {
            (parts, _) = accelerator.resume(&kept, parts)?;
        }
        let (mut model, mut optimizer, train) = parts;
        let mut figures = Vec::new();
        for batch in train.epoch(0).take(steps) {
            let batch = batch?;
            let loss = model.loss(&accelerator, &batch);
            let gradients = accelerator.backward(loss, &model, &batch)?.clip_norm(1.0);
            figures.extend(gradients.loss());
            model = optimizer.step(0.01, model, gradients);
        }
        accelerator.save_state(&kept, (&model, &optimizer, &train))?;
        let file = folder.join("model.safetensors");
        accelerator.save_model(&model, &file)?;
        accelerator.wait_for_everyone()?;
        Ok(Trained {
            figures,
            evaluated: Vec::new(),
            file: std::fs::read(&file)?,
        })
    });
    outcomes.unwrap()
}

#[test]
fn a_training_continues_at_another_number_of_ranks_sharded_or_not() {
    let stages = [
        (3, Units::Shard, 3),
        (2, Units::Shard, 2),
        (1, Units::Recompute, 1),
        (4, Units::Shard, 3),
        (2, Units::Recompute, 2),
    ];
    let (sharded, whole) = (folder_in_memory(), folder_in_memory());
    for (ranks, units, steps) in stages {
        let found = continued(sharded.path(), ranks, units, steps);
        let expected = continued(whole.path(), ranks, Units::Recompute, steps);
        assert_same(&found, &expected, &format!("{ranks} ranks, {units}"));
    }
}

/// A model whose units have a frozen base and adapters.
#[derive(Debug, Module)]
struct Tuned {
    blocks: Vec<Unit<Linear>>,
    output: Unit<Linear>,
}

impl Tuned {
    fn new(device: &Device) -> Self {
        let linear = |outputs| Unit::new(LinearConfig::new(128, outputs).init(device));
        let base = Self {
            blocks: (0..2).map(|_| linear(128)).collect(),
            output: linear(1),
        };
        known(base.apply_lora(Lora::new(2, 4.0)))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let mut x = x.repeat_dim(1, 128);
        for block in &self.blocks {
            x = block.run(x, |block, x| gelu(block.forward(x)));
        }
        let y = self.output.run(x, |output, x| output.forward(x));
        y.powi_scalar(2).mean()
    }
}

#[test]
fn a_frozen_base_is_sharded_and_its_adapters_have_the_same_bits() {
    for ranks in [1, 2, 3] {
        let outcome = |units| {
            let folder = folder_in_memory();
            let builder = Accelerator::builder().device(devices().next()).units(units);
            let outcomes = builder.launch(ranks, |accelerator| {
                let new = || accelerator.prepare((Tuned::new(&accelerator.device()), adam()));
                let checkpoints = Checkpoints::new(folder.path()).without_frozen_parameters();
                let (mut model, mut optimizer) = new()?;
                let mut figures = Vec::new();
                for step in 0..4 {
                    let x = Tensor::full([2, 1], step as f32 + 1.0, &accelerator.device());
                    let loss = accelerator.forward(&model, |model| model.loss(x));
                    let gradients = accelerator.backward(loss, &model, 2)?.clip_norm(0.1);
                    figures.extend(gradients.loss());
                    model = optimizer.step(0.01, model, gradients);
                    if step == 1 {
                        accelerator.save_state(&checkpoints, (&model, &optimizer))?;
                        ((model, optimizer), _) = accelerator.resume(&checkpoints, new()?)?;
                    }
                }
                let path = folder.path().join("adapter_model.safetensors");
                let peft = SaveOptions::new().with_layout(FileLayout::Peft);
                accelerator.save_model_with(&model, &path, &peft)?;
                accelerator.wait_for_everyone()?;
                let held = model.num_params();
                let evaluated = model
                    .valid()
                    .loss(Tensor::ones([1, 1], &accelerator.device().inner()));
                model = accelerator.load_model(model, &path)?;
                let again = model
                    .valid()
                    .loss(Tensor::ones([1, 1], &accelerator.device().inner()));
                assert_eq!(again.into_data(), evaluated.clone().into_data());
                let trained = Trained {
                    figures,
                    evaluated: evaluated.into_data().try_to_vec().unwrap(),
                    file: std::fs::read(&path)?,
                };
                Ok((trained, held))
            });
            let (trained, held): (Vec<_>, Vec<_>) = outcomes.unwrap().into_iter().unzip();
            (trained, held)
        };
        let ((found, held), (expected, whole)) = (outcome(Units::Shard), outcome(Units::Recompute));
        assert_same(&found, &expected, &format!("{ranks} ranks"));
        for held in held {
            let part = whole[0] / ranks;
            assert!(held < part * 11 / 10, "{held} of {}", whole[0]);
        }
    }
}

/// A quantised parameter stays whole; its adapters are sharded.
#[test]
fn a_quantised_base_trains_in_sharded_units() {
    let outcome = |units| {
        let folder = folder_in_memory();
        let builder = Accelerator::builder().device(devices().next()).units(units);
        let outcomes = builder.launch(2, |accelerator| {
            let scheme = accelerator.device().settings().quantization.scheme;
            let scheme = scheme.with_value(QuantValue::Q8S);
            let build = |device: &Device| {
                let linear = known(LinearConfig::new(128, 128).with_bias(false).init(device));
                let quantizer = Quantizer::new(Calibration::MinMax, scheme);
                let adapted: Linear = linear.apply_qlora(QLora::new(Lora::new(2, 4.0), quantizer));
                Unit::new(adapted.map(&mut Halves))
            };
            let new = || accelerator.prepare((build(&accelerator.device()), adam()));
            let checkpoints = Checkpoints::new(folder.path()).without_frozen_parameters();
            let (mut model, mut optimizer) = new()?;
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = Tensor::<2>::full([2, 128], step as f32 + 1.0, &accelerator.device());
                let loss = accelerator.forward(&model, |model: &Unit<Linear>| {
                    model
                        .run(x, |layer, x| layer.forward(x))
                        .powi_scalar(2)
                        .mean()
                });
                let gradients = accelerator.backward(loss, &model, 2)?;
                losses.extend(gradients.loss());
                model = optimizer.step(0.01, model, gradients);
                if step == 1 {
                    accelerator.save_state(&checkpoints, (&model, &optimizer))?;
                    ((model, optimizer), _) = accelerator.resume(&checkpoints, new()?)?;
                }
            }
            Ok(losses)
        });
        outcomes.unwrap()
    };
    let (found, expected) = (outcome(Units::Shard), outcome(Units::Recompute));
    assert_eq!(found, expected);
    assert!(found[0].windows(2).any(|pair| pair[0] != pair[1]));
}

/// Gives the factors of an adapter values that do not depend on a generator.
struct Halves;

impl ModuleMapper for Halves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.val().dtype().is_float() {
            true => param.map(|value| value.zeros_like().add_scalar(0.5).require_grad()),
            false => param,
        }
    }
}

#[test]
fn each_rank_holds_its_pieces_and_their_state() {
    let sizes = |units| {
        let builder = Accelerator::builder().device(devices().next()).units(units);
        let sizes = builder.launch(2, |accelerator| {
            let parts = (Net::new(&accelerator.device()), adam());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let batch = Column {
                numbers: Vec::new(),
                values: Tensor::ones([4, 1], &accelerator.device()),
            };
            let loss = model.loss(&accelerator, &batch);
            let gradients = accelerator.backward(loss, &model, 4)?;
            model = optimizer.step(0.01, model, gradients);
            Ok((model.num_params(), optimizer.state_memory()?))
        });
        sizes.unwrap()
    };
    let (whole, pieces) = (sizes(Units::Recompute), sizes(Units::Shard));
    let (parameters, state) = whole[0];
    let held: usize = pieces.iter().map(|(parameters, _)| parameters).sum();
    assert!(held < parameters * 11 / 10, "{held} of {parameters}");
    for (rank, (held, kept)) in pieces.into_iter().enumerate() {
        assert!(
            held * 10 < parameters * 6,
            "rank {rank}: {held} of {parameters}"
        );
        assert!(
            kept * 10 < state * 6,
            "rank {rank}: {kept} of {state} bytes"
        );
    }
}

/// Runs `body` on two ranks with sharded units, and returns its error.
fn refused(body: impl Fn(&Accelerator) -> Result<()> + Send + Sync) -> Error {
    let builder = Accelerator::builder().device(devices().next());
    let outcome = builder
        .units(Units::Shard)
        .launch(2, |accelerator| body(&accelerator));
    outcome.unwrap_err()
}

/// A step with this optimizer.
pub(crate) fn step(accelerator: &Accelerator, optimizer: ModuleOptimizer) -> Result<()> {
    let parts = (Net::new(&accelerator.device()), optimizer);
    let (model, mut optimizer) = accelerator.prepare(parts)?;
    let x = Tensor::<2>::ones([4, 1], &accelerator.device());
    let gradients = accelerator.backward(model.forward(x).mean(), &model, 4)?;
    drop(optimizer.step(0.01, model, gradients));
    Ok(())
}

#[test]
fn what_cannot_be_sharded_is_refused() {
    let lamb = refused(|accelerator| step(accelerator, LambConfig::new().init()));
    assert_contains(
        &lamb.to_string(),
        &["does not step each element of `blocks.0"],
    );

    let sharded = refused(|accelerator| {
        let parts = (Net::new(&accelerator.device()), Sharded(adam()));
        let (model, mut optimizer) = accelerator.prepare(parts)?;
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let gradients = accelerator.backward(model.forward(x).mean(), &model, 4)?;
        drop(optimizer.step(0.01, model, gradients));
        Ok(())
    });
    assert_contains(
        &sharded.to_string(),
        &["prepare the optimizer without `Sharded`"],
    );

    let local = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let mut local = LocalSgdConfig::new(3).init(accelerator, &model)?;
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        local.backward(model.forward(x).mean(), &model, 4).map(drop)
    });
    assert_error(
        &local,
        Error::is_misuse,
        &["local training steps each rank by itself"],
    );

    let inside = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let y = recompute(&model, x, |model, x| model.forward(x));
        accelerator.backward(y.mean(), &model, 4).map(drop)
    });
    assert_error(&inside, Error::is_misuse, &["runs within `recompute`"]);

    let own = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let gradients = model.forward(x).mean().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        accelerator.average(gradients, &model, 4).map(drop)
    });
    assert_error(
        &own,
        Error::is_misuse,
        &["ran outside `Accelerator::backward`"],
    );

    let builder = Accelerator::builder()
        .device(devices().next())
        .units(Units::Shard);
    let hook = builder
        .communication_hook(|| PowerSgd::new(1))
        .launch(2, |accelerator| {
            accelerator
                .prepare(Net::new(&accelerator.device()))
                .map(drop)
        });
    assert_error(
        &hook.unwrap_err(),
        Error::is_misuse,
        &["communication hook"],
    );
}

/// The first block of a [`Net`].
#[derive(Debug, Module)]
struct Start {
    blocks: Vec<Unit<Block>>,
}

#[test]
fn pieces_that_a_file_lacks_keep_their_values() {
    let folder = folder_in_memory();
    let [start, whole] = ["start", "whole"].map(|name| folder.path().join(name));
    let alone = Accelerator::new().unwrap();
    let blocks = Net::new(&alone.device()).blocks.drain(..1).collect();
    alone
        .save_model(&known_within(0.5, Start { blocks }), &start)
        .unwrap();
    let loaded = |units: Units| {
        let builder = Accelerator::builder().units(units);
        let ranks = builder.launch(2, |accelerator| {
            let model = accelerator.prepare(Net::new(&accelerator.device()))?;
            let options = LoadOptions::new().allow_partial();
            let (model, report) = accelerator.load_model_with(model, &start, &options)?;
            accelerator.save_model(&model, &whole)?;
            accelerator.wait_for_everyone()?;
            Ok((report, std::fs::read(&whole)?))
        });
        ranks.unwrap().remove(1)
    };
    let ((report, file), expected) = (loaded(Units::Shard), loaded(Units::Recompute));
    assert!(!report.loaded.is_empty() && !report.missing.is_empty());
    assert_eq!(report, expected.0);
    assert!(file == expected.1);
}

/// One of three ranks has no state to compare.
#[test]
fn an_optimizer_of_another_kind_is_refused_on_all_ranks() {
    let folder = folder_in_memory();
    let builder = Accelerator::builder().units(Units::Shard);
    let resumed = builder.launch(3, |accelerator| {
        let device = accelerator.device();
        let layer = || -> Unit<Linear> { Unit::new(known(LinearConfig::new(8, 8).init(&device))) };
        let (model, mut optimizer) = accelerator.prepare((layer(), adam()))?;
        let x = Tensor::<2>::ones([2, 8], &device);
        let loss = model.run(x, |layer, x| layer.forward(x)).mean();
        let gradients = accelerator.backward(loss, &model, 2)?;
        let model = optimizer.step(0.1, model, gradients);
        accelerator.save_state(folder.path(), (&model, &optimizer))?;
        let parts = accelerator.prepare((layer(), SgdConfig::new().init()))?;
        let error = accelerator.resume(folder.path(), parts).err();
        Ok(error.is_some_and(|error| error.is_checkpoint()))
    });
    assert_eq!(resumed.unwrap(), [true; 3]);
}

#[test]
fn a_rank_that_takes_another_branch_ends_the_training_with_an_error() {
    let error = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let y = match accelerator.rank() {
            0 => model.forward(x),
            _ => model.output.forward(model.input.forward(x)),
        };
        accelerator.backward(y.mean(), &model, 4).map(drop)
    });
    assert!(error.is_collective(), "{error:?}");
}

#[test]
fn a_rank_that_runs_another_unit_of_the_same_shape_ends_the_training_with_an_error() {
    let error = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let x = Tensor::<2>::ones([4, 8], &accelerator.device());
        let block = &model.blocks[accelerator.rank()];
        let y = block.run(x, |block, x| block.wide.forward(block.narrow.forward(x)));
        accelerator.backward(y.mean(), &model, 4).map(drop)
    });
    assert!(error.is_collective(), "{error:?}");
    assert_contains(
        &error.to_string(),
        &["gather unit 0 (forward)", "gather unit 2 (forward)"],
    );
}

#[test]
fn a_call_that_fails_on_one_rank_ends_the_training_on_all() {
    let error = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let y = model.forward(x);
        let loss = match accelerator.rank() {
            0 => y.mean(),
            // It has four elements.
            _ => y.flatten(0, 1),
        };
        let failed = accelerator.backward(loss, &model, 4).map(drop);
        assert!(failed.is_err());
        accelerator.wait_for_everyone()
    });
    assert!(error.is_collective() || error.is_misuse(), "{error:?}");
    assert_contains(&error.to_string(), &["the loss has 4 elements"]);
}

#[test]
fn a_model_that_is_divided_otherwise_than_its_optimizer_has_stepped_is_refused() {
    let error = refused(|accelerator| {
        let mut net = Net::new(&accelerator.device());
        net.blocks.truncate(1);
        let (mut model, mut optimizer) = accelerator.prepare((net, adam()))?;
        let step = |model: Net, optimizer: &mut PreparedOptimizer<Manual>| {
            let x = Tensor::<2>::ones([4, 1], &accelerator.device());
            let gradients = accelerator.backward(model.forward(x).mean(), &model, 4)?;
            Ok::<_, Error>(optimizer.step(0.01, model, gradients))
        };
        model = step(model, &mut optimizer)?;
        // The same parameters, and others before them.
        let more = Net::new(&accelerator.device()).blocks.remove(0);
        model.blocks.insert(0, more);
        model = accelerator.prepare(model)?;
        step(model, &mut optimizer).map(drop)
    });
    assert_contains(&error.to_string(), &["divided differently"]);
}

#[test]
fn a_rank_alone_is_told_that_the_others_must_take_part() {
    let error = refused(|accelerator| {
        let model = accelerator.prepare(Net::new(&accelerator.device()))?;
        accelerator.on_main_process(|| {
            let x = Tensor::<2>::ones([4, 1], &accelerator.device().inner());
            let y: Vec<f32> = model.valid().forward(x).into_data().try_to_vec().unwrap();
            assert!(y.iter().all(|value| value.is_nan()));
        });
        accelerator.save_model(&model, folder_in_memory().path().join("model.safetensors"))
    });
    assert!(error.is_misuse() || error.is_collective(), "{error:?}");
    assert_contains(&error.to_string(), &["on one rank only"]);
}

/// A layer that is in a unit and outside, too.
#[derive(Debug, Module)]
struct Twice {
    first: Unit<Linear>,
    middle: Unit<Linear>,
    last: Linear,
}

#[test]
fn what_is_tied_across_units_stays_whole_and_trains_to_the_same_bits() {
    let trained = |units| {
        let folder = folder_in_memory();
        let file = folder.path().join("model.safetensors");
        let builder = Accelerator::builder().device(devices().next()).units(units);
        let ranks = builder.launch(2, |accelerator| {
            let linear =
                || -> Linear { known(LinearConfig::new(100, 100).init(&accelerator.device())) };
            let last = linear();
            let parts = Twice {
                first: Unit::new(last.clone()),
                middle: Unit::new(linear()),
                last,
            };
            let (mut model, mut optimizer) = accelerator.prepare((parts, adam()))?;
            for step in 0..4 {
                let place = (step * 2 + accelerator.rank()) as f64 / 8.0;
                let x = Tensor::<2>::ones([3, 100], &accelerator.device()) * place;
                let x = gelu(model.first.run(x, |first, x| first.forward(x)));
                let x = gelu(model.middle.run(x, |middle, x| middle.forward(x)));
                let loss = model.last.forward(x).powi_scalar(2).mean();
                let gradients = accelerator.backward(loss, &model, 3)?.clip_norm(1.0);
                model = optimizer.step(0.01, model, gradients);
            }
            let whole = 2 * (100 * 100 + 100);
            let is_sharded = model.num_params() < whole + whole / 2;
            assert_eq!(is_sharded, units == Units::Shard, "{}", model.num_params());
            accelerator.save_model(&model, &file)?;
            accelerator.wait_for_everyone()?;
            Ok(std::fs::read(&file)?)
        });
        ranks.unwrap().remove(0)
    };
    assert!(trained(Units::Shard) == trained(Units::Recompute));
}

#[test]
fn a_trainers_argument_shards_by_hugging_faces_name() {
    let held = |fsdp| {
        let arguments = TrainingArguments {
            fsdp,
            ..TrainingArguments::default()
        };
        let builder = arguments.accelerator().device(devices().next());
        let ranks = builder.launch(2, |accelerator| {
            let model = accelerator.prepare(Net::new(&accelerator.device()))?;
            Ok(model.num_params())
        });
        ranks.unwrap().into_iter().sum::<usize>()
    };
    let (whole, sharded) = (held(FsdpStrategy::NoShard), held(FsdpStrategy::FullShard));
    assert!(sharded < whole * 6 / 10, "{sharded} of {whole}");
}

#[test]
fn one_rank_recomputes() {
    let builder = Accelerator::builder().units(Units::Shard).step_summary();
    let accelerator = builder.launched_as(Launch::single()).build().unwrap();
    let whole = Net::new(&accelerator.device()).num_params();
    let model = accelerator
        .prepare(Net::new(&accelerator.device()))
        .unwrap();
    assert_eq!(model.num_params(), whole);
    train(&accelerator, folder_in_memory().path(), Course::Plain).unwrap();
    let summary = accelerator.step_summary().unwrap();
    assert!(summary.recomputing.mean > 0.0, "{summary}");
}
