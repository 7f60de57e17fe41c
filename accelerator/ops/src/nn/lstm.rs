use core::fmt;
use core::ops::{Deref, DerefMut};

use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::nn::activation::{Activation, ActivationConfig};
use burn::nn::{GateController, Initializer, LstmState};
use burn::tensor::{Device, Tensor, s};
use serde::{Deserialize, Serialize};

use super::{config, layer};

layer! {
    /// A long short-term memory, whose steps are one operation of the graph.
    Lstm(burn::nn::Lstm)
}

config! {
    /// The configuration of an [`Lstm`] layer.
    LstmConfig(burn::nn::LstmConfig) -> Lstm, new(d_input: usize, d_hidden: usize, bias: bool),
    with_initializer(Initializer), with_batch_first(bool), with_reverse(bool), with_clip(Option<f64>),
    with_input_forget(bool), with_gate_activation(ActivationConfig), with_cell_activation(ActivationConfig),
    with_hidden_activation(ActivationConfig); init(device)
}

impl Lstm {
    /// Returns the hidden state after each step, and the state after the last one, as Burn's layer does.
    ///
    /// The input is `[batch, steps, inputs]`, or `[steps, batch, inputs]` if the layer says so, and the output has the same
    /// order. Without a state, sequences begin with zeros. If steps are reversed, cells are clipped, gates are coupled
    /// or activations are unusual, Burn's layer computes them.
    ///
    /// # Panics
    ///
    /// Panics if the shapes do not fit.
    pub fn forward(
        &self,
        input: Tensor<3>,
        state: Option<LstmState<2>>,
    ) -> (Tensor<3>, LstmState<2>) {
        match fused(&self.0, &input, state.as_ref()) {
            Some(output) => output,
            None => self.0.forward(input, state),
        }
    }
}

/// Returns the result if there is a kernel for this layer and its input.
fn fused(
    layer: &burn::nn::Lstm,
    input: &Tensor<3>,
    state: Option<&LstmState<2>>,
) -> Option<(Tensor<3>, LstmState<2>)> {
    let is_usual = matches!(layer.gate_activation, Activation::Sigmoid(_))
        && matches!(layer.cell_activation, Activation::Tanh(_))
        && matches!(layer.hidden_activation, Activation::Tanh(_))
        && !layer.reverse
        && layer.clip.is_none();
    let gates = [
        &layer.input_gate,
        layer.forget_gate.as_ref()?,
        &layer.output_gate,
        &layer.cell_gate,
    ];
    let input = match layer.batch_first {
        true => input.clone(),
        false => input.clone().swap_dims(0, 1),
    };
    let [batch, steps, _] = input.dims();
    if !is_usual || [batch, steps, layer.d_hidden].contains(&0) {
        return None;
    }
    let weights = |of: fn(&GateController) -> &burn::nn::Linear| {
        let weights = gates.map(|gate| of(gate).weight.val());
        Tensor::cat(weights.to_vec(), 1)
    };
    let biases = gates.iter().flat_map(|gate| {
        let of = |layer: &burn::nn::Linear| layer.bias.as_ref().map(|bias| bias.val());
        Some(of(&gate.input_transform)? + of(&gate.hidden_transform)?)
    });
    let biases: Vec<Tensor<1>> = biases.collect();
    let bias = (biases.len() == gates.len()).then(|| Tensor::cat(biases, 0));
    let products = crate::linear(input.clone(), weights(|gate| &gate.input_transform), bias);
    let zeros = || Tensor::zeros([batch, layer.d_hidden], (&input.device(), input.dtype()));
    let (cell, hidden) = match state {
        Some(state) => state.clone().unpack(),
        None => (zeros(), zeros()),
    };
    let states = crate::lstm(
        products,
        weights(|gate| &gate.hidden_transform),
        hidden,
        cell,
    )?;
    let last = |at| states.clone().slice(s![.., at, ..]).squeeze_dim(1);
    let (hidden, cell) = (last(steps - 1), last(steps));
    let output = states.slice(s![.., ..steps, ..]);
    let output = match layer.batch_first {
        true => output,
        false => output.swap_dims(0, 1),
    };
    Some((output, LstmState::new(cell, hidden)))
}
