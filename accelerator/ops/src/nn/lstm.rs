use core::fmt;
use core::ops::{Deref, DerefMut};

use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::nn::activation::ActivationConfig;
use burn::nn::{Initializer, LstmState};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
#[cfg(feature = "flex")]
use {
    crate::backend::{four, is_served},
    crate::kernel,
    burn::nn::GateController,
    burn::nn::activation::Activation,
    burn::tensor::s,
};

use super::{config, layer};

layer! {
    /// An LSTM layer that runs all its steps as one operation of the graph.
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
    /// The input is `[batch, steps, inputs]`, or `[steps, batch, inputs]` with `with_batch_first(false)`; the output has the
    /// same order. Without a state, the initial states are zero. Burn's layer runs instead if the layer is reversed,
    /// clips its cells, couples its gates, or has activations other than sigmoid (gates) and tanh (cells and hidden
    /// states).
    ///
    /// # Panics
    ///
    /// Panics if the shapes do not fit.
    pub fn forward(
        &self,
        input: Tensor<3>,
        state: Option<LstmState<2>>,
    ) -> (Tensor<3>, LstmState<2>) {
        #[cfg(feature = "flex")]
        if let Some(result) = fused(&self.0, &input, state.as_ref()) {
            return result;
        }
        self.0.forward(input, state)
    }
}

/// Returns the result if there is a kernel for this layer and its input.
#[cfg(feature = "flex")]
fn fused(
    layer: &burn::nn::Lstm,
    input: &Tensor<3>,
    state: Option<&LstmState<2>>,
) -> Option<(Tensor<3>, LstmState<2>)> {
    let is_usual = matches!(layer.gate_activation, Activation::Sigmoid(_))
        && matches!(layer.cell_activation, Activation::Tanh(_))
        && matches!(layer.hidden_activation, Activation::Tanh(_))
        && !layer.reverse
        && !layer.input_forget
        && layer.clip.is_none();
    let time = usize::from(layer.batch_first);
    let [steps, batch] = [input.dims()[time], input.dims()[1 - time]];
    let of_state = [batch, layer.d_hidden];
    let fits =
        state.is_none_or(|state| state.hidden.dims() == of_state && state.cell.dims() == of_state);
    if !is_usual || !fits || [batch, steps, layer.d_hidden].contains(&0) || !is_served(input) {
        return None;
    }
    let gates = [
        &layer.input_gate,
        layer.forget_gate.as_ref()?,
        &layer.output_gate,
        &layer.cell_gate,
    ];
    let weights = |of: fn(&GateController) -> &burn::nn::Linear| {
        let weights = gates.map(|gate| of(gate).weight.val());
        Tensor::cat(weights.to_vec(), 1)
    };
    let biases = gates.iter().filter_map(|gate| {
        let of = |layer: &burn::nn::Linear| layer.bias.as_ref().map(|bias| bias.val());
        let biases = [of(&gate.input_transform), of(&gate.hidden_transform)];
        biases.into_iter().flatten().reduce(|sum, bias| sum + bias)
    });
    let biases: Vec<Tensor<1>> = biases.collect();
    let bias = match biases.len() {
        0 => None,
        4 => Some(Tensor::cat(biases, 0)),
        _ => return None,
    };
    let input = match layer.batch_first {
        true => input.clone(),
        false => input.clone().swap_dims(0, 1),
    };
    let zeros = || Tensor::zeros(of_state, (&input.device(), input.dtype()));
    let (cell, hidden) = match state {
        Some(state) => state.clone().unpack(),
        None => (zeros(), zeros()),
    };
    let products = crate::linear(input.clone(), weights(|gate| &gate.input_transform), bias);
    let inputs = [
        products.into_dispatch(),
        weights(|gate| &gate.hidden_transform).into_dispatch(),
        hidden.into_dispatch(),
        cell.into_dispatch(),
    ];
    let states = four::<3>(inputs, kernel::lstm)?;
    let last = |at| states.clone().slice(s![.., at, ..]).squeeze_dim(1);
    let (hidden, cell) = (last(steps - 1), last(steps));
    let output = states.slice(s![.., ..steps, ..]);
    let output = match layer.batch_first {
        true => output,
        false => output.swap_dims(0, 1),
    };
    Some((output, LstmState::new(cell, hidden)))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn usual_layers_have_a_kernel() {
        let device = Device::flex().autodiff();
        let config = || LstmConfig::new(5, 7, true);
        let is_fused = |layer: &burn::nn::Lstm| {
            let x = Tensor::ones([2, 3, 5], &device);
            fused(layer, &x, None).is_some()
        };
        assert!(is_fused(&config().init(&device)));
        assert!(is_fused(&config().with_batch_first(false).init(&device)));
        assert!(is_fused(&LstmConfig::new(5, 7, false).init(&device)));
        assert!(!is_fused(&config().with_reverse(true).init(&device)));
        let mut coupled: burn::nn::Lstm = config().init(&device).into();
        coupled.input_forget = true;
        assert!(!is_fused(&coupled));
    }

    #[test]
    fn biases_of_one_transform_count() {
        let device = Device::flex().autodiff();
        let mut layer = LstmConfig::new(5, 7, true).init(&device);
        layer.input_gate.hidden_transform.bias = None;
        layer.cell_gate.input_transform.bias = None;
        let x = || Tensor::<3>::ones([2, 3, 5], &device);
        let ((ours, _), (burns, _)) = (layer.forward(x(), None), layer.0.forward(x(), None));
        assert!((ours - burns).abs().max().into_scalar::<f32>() < 1e-6);
    }

    #[test]
    fn a_state_for_all_sequences_is_burns() {
        let device = Device::flex().autodiff();
        let layer = LstmConfig::new(5, 7, true).init(&device);
        let state = LstmState::new(Tensor::ones([1, 7], &device), Tensor::ones([1, 7], &device));
        let (output, _) = layer.forward(Tensor::ones([2, 3, 5], &device), Some(state));
        assert_eq!(output.dims(), [2, 3, 7]);
    }
}
