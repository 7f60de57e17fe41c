//! Units of a model, which draw the same numbers whatever they do.

use crate::alone;
use crate::common::{ColumnBatcher, columns, devices, flat, folder_in_memory, known};
use accelerator::nn::{Unit, Units, recompute};
use accelerator::prelude::*;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Distribution, Tensor};

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
    dropout: Dropout,
}

impl Layer {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.dropout.forward(self.linear.forward(x)).tanh()
    }
}

#[derive(Module, Debug)]
struct Block {
    first: Layer,
    within: Unit<Layer>,
    last: Layer,
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Unit<Block>>,
    dropout: Dropout,
    head: Linear,
}

impl Net {
    fn new(dropout: f64, device: &Device) -> Self {
        let layer = |inputs| Layer {
            linear: LinearConfig::new(inputs, 6).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        };
        let block = |inputs| {
            Unit::new(Block {
                first: layer(inputs),
                within: Unit::new(layer(6)),
                last: layer(6),
            })
        };
        known(Self {
            blocks: vec![block(1), block(6), block(6)],
            dropout: DropoutConfig::new(dropout).init(),
            head: LinearConfig::new(6, 1).init(device),
        })
    }

    fn forward(&self, mut x: Tensor<2>) -> Tensor<2> {
        for block in &self.blocks {
            x = block.run(x, |block, x| {
                let x = block.within.run(block.first.forward(x), Layer::forward);
                block.last.forward(x)
            });
            // It draws outside of units, too.
            x = self.dropout.forward(x);
        }
        self.head.forward(x)
    }
}

/// Trains, and returns the values of all parameters.
fn trained(kind: BackendKind, units: Units, dropout: f64) -> Result<Vec<f32>> {
    let accelerator = Accelerator::builder().device(kind).units(units).build()?;
    let model = Net::new(dropout, &accelerator.device());
    let train = LoaderBuilder::new(ColumnBatcher).batch_size(5).shuffle(1);
    let parts = (model, SgdConfig::new().init(), train.build(columns(18)));
    let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
    for epoch in 0..3 {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = (model.forward(batch.values.clone()) - batch.values.clone()).powi_scalar(2);
            let gradients = accelerator.backward(loss.mean(), &model, &batch)?;
            // What is drawn after backward is the same, too.
            let noise =
                Tensor::<1>::random([1], Distribution::Default, &accelerator.device().inner());
            let rate = 0.1 * noise.into_scalar::<f64>();
            model = optimizer.step(rate, model, gradients);
        }
    }
    Ok(flat(&model))
}

#[test]
fn both_runs_of_a_block_draw_the_same_mask() {
    let _alone = alone();
    for kind in devices() {
        let accelerator = Accelerator::builder().device(kind).build().unwrap();
        let device = accelerator.device();
        let run = move |seed| {
            std::thread::scope(|scope| {
                let device = device.clone();
                let draw = move || {
                    device.clone().inner().seed(seed);
                    let dropout = DropoutConfig::new(0.5).init();
                    let x = Tensor::<2>::ones([8, 8], &device).require_grad();
                    let y = recompute(&dropout, x.clone(), |dropout, x| dropout.forward(x));
                    let gradients = y.clone().sum().backward();
                    let gradient = x.grad(&gradients).unwrap().into_data();
                    assert_eq!(gradient, y.into_data(), "the mask of both runs");
                    gradient
                };
                scope.spawn(draw).join().unwrap()
            })
        };
        assert_eq!(run(1), run(1));
    }
}

#[test]
fn a_model_with_dropout_trains_to_the_same_bits_whatever_its_units_do() {
    let _alone = alone();
    for kind in devices() {
        let expected = trained(kind, Units::Plain, 0.4).unwrap();
        assert_ne!(trained(kind, Units::Plain, 0.0).unwrap(), expected);
        assert_eq!(trained(kind, Units::Keep, 0.4).unwrap(), expected);
        assert_eq!(trained(kind, Units::Recompute, 0.4).unwrap(), expected);
    }
}

#[test]
fn blocks_with_dropout_draw_the_same_if_they_are_sharded() {
    let _alone = alone();
    let values = |units| {
        let folder = folder_in_memory();
        let file = folder.path().join("model.safetensors");
        let builder = Accelerator::builder().device(devices().next()).units(units);
        let ranks = builder.launch(2, |accelerator| {
            let mut model = Net::new(0.4, &accelerator.device());
            // Ranks that are threads draw outside of units in no fixed order.
            model.dropout = DropoutConfig::new(0.0).init();
            let train = LoaderBuilder::new(ColumnBatcher).batch_size(3).shuffle(1);
            let parts = (model, SgdConfig::new().init(), train.build(columns(18)));
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            for batch in train.epoch(0) {
                let batch = batch?;
                let loss =
                    (model.forward(batch.values.clone()) - batch.values.clone()).powi_scalar(2);
                let gradients = accelerator.backward(loss.mean(), &model, &batch)?;
                model = optimizer.step(0.1, model, gradients);
            }
            accelerator.save_model(&model, &file)?;
            accelerator.wait_for_everyone()?;
            Ok(std::fs::read(&file)?)
        });
        ranks.unwrap().remove(0)
    };
    assert!(values(Units::Shard) == values(Units::Recompute));
}

/// Counts the parameters that are drawn.
#[derive(Default)]
struct Drawn(usize);

impl ModuleVisitor for Drawn {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0 += usize::from(param.is_initialized());
    }
}

#[derive(Debug, Module)]
struct Undrawn {
    input: Linear,
    middle: Vec<Unit<Linear>>,
    output: Linear,
}

#[test]
fn the_weights_are_those_that_rank_0_would_draw_and_no_other_rank_draws_units() {
    let _alone = alone();
    let weights = |units| {
        let folder = folder_in_memory();
        let file = folder.path().join("model.safetensors");
        let builder = Accelerator::builder().device(devices().next()).units(units);
        let ranks = builder.launch(3, |accelerator| {
            let model = accelerator.init(|device| {
                let linear = || -> Linear { LinearConfig::new(120, 120).init(device) };
                Undrawn {
                    input: linear(),
                    middle: (0..3).map(|_| Unit::new(linear())).collect(),
                    output: linear(),
                }
            });
            let mut drawn = Drawn::default();
            model.visit(&mut drawn);
            let is_whole = accelerator.is_main_process() || units != Units::Shard;
            assert_eq!(drawn.0, if is_whole { 10 } else { 4 });
            let model = accelerator.prepare(model)?;
            accelerator.save_model(&model, &file)?;
            accelerator.wait_for_everyone()?;
            Ok(std::fs::read(&file)?)
        });
        ranks.unwrap().remove(0)
    };
    assert!(weights(Units::Shard) == weights(Units::Plain));
}
