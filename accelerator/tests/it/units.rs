//! Models whose blocks are recomputed train to the bits of those whose blocks are not.

use std::path::Path;

use crate::common::{
    Column, ColumnBatcher, assert_error, columns, connected, devices, flat, folder_in_memory, known,
};
use accelerator::collective::Launch;
use accelerator::nn::{Operations, SyncBatchNorm, Unit, Units};
use accelerator::optim::Sharded;
use accelerator::train::TrainingArguments;
use accelerator::{AcceleratorBuilder, Overlap, OverlapState, prelude::*};
use burn::module::{Lora, Module};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};

#[derive(Debug, Module)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
    frozen: Linear,
}

#[derive(Debug, Module)]
struct Net {
    input: Linear,
    blocks: Vec<Unit<Block>>,
    /// One layer, twice.
    tied: Unit<[Linear; 2]>,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear =
            |inputs, outputs| -> Linear { LinearConfig::new(inputs, outputs).init(device) };
        let block = || {
            Unit::new(Block {
                linear: linear(8, 8),
                norm: BatchNormConfig::new(8).init(device),
                frozen: linear(8, 8).no_grad(),
            })
        };
        let tied = known(linear(8, 8));
        let mut net = known(Self {
            input: linear(1, 8),
            blocks: (0..3).map(|_| block()).collect(),
            tied: Unit::new([linear(8, 8), linear(8, 8)]),
            output: linear(8, 1),
        });
        net.tied = Unit::new([tied.clone(), tied]);
        net
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = gelu(self.input.forward(x));
        for block in &self.blocks {
            (x, _) = block.run((x, None::<Tensor<1>>), |block, (x, nothing)| {
                let y = accelerator::precision::in_full(block.linear.forward(x.clone()), |x| {
                    block.norm.forward(x)
                });
                (x + block.frozen.forward(gelu(y)), nothing)
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

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Course {
    Plain,
    Clipped,
    Ema,
    LocalSgd,
    /// Continues from a checkpoint after the first epoch.
    Resumed,
    Sharded,
}

const COURSES: [Course; 6] = [
    Course::Plain,
    Course::Clipped,
    Course::Ema,
    Course::LocalSgd,
    Course::Resumed,
    Course::Sharded,
];

/// Trains for two epochs of batches that are not a multiple of the ranks; returns all values.
fn train(accelerator: &Accelerator, folder: &Path, course: Course) -> Result<Vec<f32>> {
    let loader = LoaderBuilder::new(ColumnBatcher).batch_size(3).shuffle(1);
    let model = Net::new(&accelerator.device());
    let (mut model, train) = accelerator.prepare((model, loader.build(columns(22))))?;
    let adam = || AdamWConfig::new().init();
    let mut optimizer = match course {
        Course::Sharded => accelerator.prepare(Sharded(adam()))?,
        _ => accelerator.prepare(adam())?,
    };
    let mut ema = Ema::new(&model, 0.9);
    let mut local = match course {
        Course::LocalSgd => Some(LocalSgdConfig::new(3).init(accelerator, &model)?),
        _ => None,
    };
    for epoch in 0..2 {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = model.loss(accelerator, &batch);
            let gradients = match &mut local {
                Some(local) => local.backward(loss, &model, &batch)?,
                None => accelerator.backward(loss, &model, &batch)?,
            };
            let gradients = match course {
                Course::Clipped => gradients.clip_norm(0.1),
                _ => gradients,
            };
            model = optimizer.step(0.01, model, gradients);
            if let Some(local) = &mut local {
                local.step(&mut model)?;
            }
            ema.update(&model);
        }
        if course == Course::Resumed && epoch == 0 {
            accelerator.save_state(folder, (&model, &optimizer))?;
            let new = (Net::new(&accelerator.device()), adam());
            ((model, optimizer), _) = accelerator.resume(folder, accelerator.prepare(new)?)?;
        }
    }
    if let Some(local) = local {
        local.finish(&mut model)?;
    }
    Ok(match course {
        Course::Ema => flat(ema.model()),
        _ => flat(&model.valid()),
    })
}

/// Returns the values of each rank.
fn of_ranks(builder: AcceleratorBuilder, ranks: usize, course: Course) -> Vec<Vec<f32>> {
    let folder = folder_in_memory();
    let outcomes = builder.launch(ranks, |accelerator| {
        train(&accelerator, folder.path(), course)
    });
    outcomes.unwrap()
}

#[test]
fn a_training_has_the_same_bits_whatever_units_do() {
    for kind in devices() {
        for ranks in [1, 2, 3] {
            for course in COURSES {
                let outcome = |units| {
                    let builder = Accelerator::builder().device(kind).bucket_size(1024);
                    of_ranks(builder.units(units).accumulation_steps(2), ranks, course)
                };
                let expected = outcome(Units::Plain);
                let finite = expected.iter().flatten().all(|value| value.is_finite());
                assert!(finite && expected[0] != flat(&Net::new(&Device::default())));
                for units in [Units::Keep, Units::Recompute] {
                    assert_eq!(
                        outcome(units),
                        expected,
                        "{kind}, {ranks} ranks, {course:?}, {units}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_training_in_half_precision_has_the_same_bits_whatever_units_do() {
    for precision in [Precision::Bf16, Precision::F16] {
        for overlap in [Overlap::Off, Overlap::On] {
            let outcome = |units| {
                let builder = Accelerator::builder()
                    .device(BackendKind::Flex)
                    .bucket_size(1024);
                let builder = builder.precision(precision).overlap(overlap).units(units);
                of_ranks(builder, 2, Course::Plain)
            };
            let expected = outcome(Units::Plain);
            for units in [Units::Keep, Units::Recompute] {
                assert_eq!(outcome(units), expected, "{precision}, {overlap}, {units}");
            }
        }
    }
}

#[test]
fn units_hand_over_their_gradients_early_in_half_precision() {
    for precision in [Precision::Bf16, Precision::F16] {
        for units in [Units::Keep, Units::Recompute] {
            let builder = Accelerator::builder()
                .device(BackendKind::Flex)
                .bucket_size(1024)
                .precision(precision)
                .overlap(Overlap::On)
                .units(units);
            let reports = builder.launch(2, |accelerator| {
                let mut model = Net::new(&accelerator.device());
                let more = (0..8).flat_map(|_| Net::new(&accelerator.device()).blocks);
                model.blocks.extend(more);
                let (mut model, mut optimizer) =
                    accelerator.prepare((model, AdamWConfig::new().init()))?;
                for step in 0..6 {
                    let place = (step * 2 + accelerator.rank()) as f32;
                    let batch = Column {
                        numbers: Vec::new(),
                        values: Tensor::full([8, 1], place / 8.0, &accelerator.device()),
                    };
                    let loss = model.loss(&accelerator, &batch);
                    let gradients = accelerator.backward(loss, &model, 8)?;
                    model = optimizer.step(0.01, model, gradients);
                }
                accelerator.overlap_report(&model)
            });
            for report in reports.unwrap() {
                assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
                assert!(
                    report.early * 2 > report.buckets,
                    "{precision}, {units}: {report:?}"
                );
            }
        }
    }
}

#[test]
fn a_training_over_connections_has_the_same_bits_whatever_units_do() {
    let outcome = |units| {
        let folder = folder_in_memory();
        let ranks = connected(
            3,
            |place| place,
            |_, builder| {
                let builder = builder.device(devices().next()).overlap(Overlap::On);
                let accelerator = builder.bucket_size(1024).units(units).build()?;
                let values = train(&accelerator, folder.path(), Course::Clipped)?;
                accelerator.finish()?;
                Ok(values)
            },
        );
        ranks.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let expected = outcome(Units::Plain);
    for units in [Units::Keep, Units::Recompute] {
        assert_eq!(outcome(units), expected, "{units}");
    }
}

#[test]
fn adapters_in_units_learn_the_same_whatever_units_do() {
    let outcome = |units| {
        let builder = Accelerator::builder().device(devices().next()).units(units);
        let ranks = builder.launch(2, |accelerator| {
            let adapted = Net::new(&accelerator.device()).apply_lora(Lora::new(2, 4.0));
            let parts = (known(adapted), AdamWConfig::new().init());
            let (mut model, mut optimizer) = accelerator.prepare(parts)?;
            let before = flat(&model);
            for step in 0..4 {
                let place = (step * 2 + accelerator.rank()) as f32;
                let values = Tensor::<2>::full([5, 1], place, &accelerator.device());
                let batch = Column {
                    numbers: Vec::new(),
                    values,
                };
                let loss = model.loss(&accelerator, &batch);
                let gradients = accelerator.backward(loss, &model, 5)?;
                model = optimizer.step(0.01, model, gradients);
            }
            let after = flat(&model.valid());
            assert_ne!(before, after);
            Ok(after)
        });
        ranks.unwrap()
    };
    let expected = outcome(Units::Plain);
    for units in [Units::Keep, Units::Recompute] {
        assert!(outcome(units) == expected, "{units}");
    }
}

#[test]
fn a_layer_that_communicates_is_refused_in_a_block_that_is_recomputed() {
    let run = |units| {
        Accelerator::builder()
            .units(units)
            .launch(2, |accelerator| {
                let norm = BatchNormConfig::new(1).init(&accelerator.device());
                let norm = Unit::new(SyncBatchNorm::of(norm, &accelerator));
                let norm = accelerator.prepare(norm)?;
                let input =
                    Tensor::<2>::ones([2, 1], &accelerator.device()) * accelerator.rank() as f64;
                let output = norm.run(input, |norm, input| norm.forward(input, 2));
                accelerator.backward(output.mean(), &norm, 2).map(drop)
            })
    };
    run(Units::Keep).unwrap();
    assert_error(
        &run(Units::Recompute).unwrap_err(),
        Error::is_misuse,
        &["`SyncBatchNorm` is in a block that is recomputed"],
    );
}

#[test]
fn operations_that_are_recomputed_train_to_the_same_bits_beside_units() {
    for kind in devices() {
        let outcome = |operations, units| {
            let builder = Accelerator::builder().device(kind).operations(operations);
            of_ranks(builder.units(units), 2, Course::Clipped)
        };
        let expected = outcome(Operations::Keep, Units::Plain);
        for units in [Units::Plain, Units::Keep, Units::Recompute] {
            assert_eq!(outcome(Operations::Recompute, units), expected, "{units}");
        }
    }
}

#[test]
fn a_model_of_another_device_is_refused_where_operations_are_recomputed() {
    let builder = Accelerator::builder().operations(Operations::Recompute);
    let accelerator = builder.launched_as(Launch::single()).build().unwrap();
    let other = accelerator.device().inner().autodiff();
    let refused = accelerator.prepare(Net::new(&other)).map(drop);
    assert_error(
        &refused.unwrap_err(),
        Error::is_misuse,
        &["build it on `accelerator.device()`"],
    );
    accelerator
        .prepare(Net::new(&accelerator.device()))
        .unwrap();
}

#[test]
fn a_summary_of_steps_tells_the_time_of_recomputed_blocks() {
    let recomputing = |gradient_checkpointing| {
        let arguments = TrainingArguments {
            gradient_checkpointing,
            ..TrainingArguments::default()
        };
        let builder = arguments.accelerator().step_summary();
        let accelerator = builder.launched_as(Launch::single()).build()?;
        train(&accelerator, folder_in_memory().path(), Course::Plain)?;
        let summary = accelerator.step_summary().unwrap();
        assert!(summary.steps > 5 && summary.backward.mean > 0.0);
        let is_shown = summary.to_string().contains("recomputing");
        assert_eq!(is_shown, summary.recomputing.mean > 0.0);
        Ok::<_, Error>(summary.recomputing.mean)
    };
    assert_eq!(recomputing(false).unwrap(), 0.0);
    assert!(recomputing(true).unwrap() > 0.0);
}
