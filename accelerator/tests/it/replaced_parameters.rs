//! Parameters that the program replaces in a prepared model.

use crate::common::{assert_contains, assert_error, line, linear};
use accelerator::prelude::*;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};

#[derive(Debug, Module)]
struct Net {
    body: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            body: linear(1, 1, device),
            head: line(device),
        }
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let input = Tensor::<2>::ones([2, 1], device);
        self.head.forward(self.body.forward(input)).mean()
    }
}

/// Returns the model with halved values in its head's weight, in a parameter with the same id or with a new one.
fn halved(mut model: Net, keep_id: bool) -> Net {
    let weight = model.head.weight;
    let value = weight.val().mul_scalar(0.5).detach();
    model.head.weight = match keep_id {
        true => Param::initialized(weight.id, value.require_grad()),
        false => Param::from_tensor(value),
    };
    model
}

#[test]
fn a_replaced_parameter_is_named_with_what_keeps_its_id() {
    for ranks in [1, 2] {
        let outcomes = accelerator::launch(ranks, |accelerator| {
            let device = accelerator.device();
            let model = accelerator.prepare(Net::new(&device))?;
            let model = halved(model, false);
            let id = model.head.weight.id.to_string();
            let error = accelerator.backward(model.loss(&device), &model, 2);
            Ok((id, error.map(drop).unwrap_err()))
        });
        for (id, error) in outcomes.unwrap() {
            let words = ["`head.weight`", &*id, "Param::initialized(param.id,"];
            assert_error(&error, Error::is_misuse, &words);
        }
    }
}

#[test]
fn a_parameter_that_keeps_its_id_trains_on_with_its_state() {
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let parts = (Net::new(&device), AdamWConfig::new().init());
    let (mut model, mut optimizer) = accelerator.prepare(parts).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        model = halved(model, true);
        let loss = model.loss(&device);
        let gradients = accelerator.backward(loss, &model, 2).unwrap();
        model = optimizer.step(0.1, model, gradients);
    }
    let saved = accelerator.save_state(folder.path(), (&model, &optimizer));
    saved.unwrap();
}

#[test]
fn state_of_a_replaced_parameter_is_named_when_it_is_saved() {
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let parts = (Net::new(&device), AdamWConfig::new().init());
    let (mut model, mut optimizer) = accelerator.prepare(parts).unwrap();
    for _ in 0..2 {
        let loss = model.loss(&device);
        let gradients = accelerator.backward(loss, &model, 2).unwrap();
        model = optimizer.step(0.1, model, gradients);
        model = accelerator.prepare(halved(model, false)).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let error = accelerator.save_state(folder.path(), (&model, &optimizer));
    let text = error.map(drop).unwrap_err().to_string();
    assert_contains(&text, &["`head.weight`", "Param::initialized(param.id,"]);
}
