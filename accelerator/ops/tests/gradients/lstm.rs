//! LSTM layers, compared with Burn's layer and with a step-by-step definition.

use accelerator_ops::nn;
use burn::module::Param;
use burn::tensor::{Device, Tensor, TensorData, activation};
use proptest::prelude::*;

use super::{Leaves, assert_same, drawing, numbers};

proptest! {
    #[test]
    fn lstm(
        batch in 1_usize..40,
        steps in 1_usize..12,
        inputs in 1_usize..20,
        width in 1_usize..40,
        has_bias: bool,
        batch_first: bool,
        seed in 0..u64::MAX / 2,
    ) {
        assert_same(
            &leaves_of_lstm([batch, steps, inputs, width], has_bias, seed),
            |leaves| states_of_lstm(leaves, batch_first, |layer, x, state| nn::Lstm::from(layer).forward(x, state)),
            |leaves| states_of_lstm(leaves, batch_first, steps_by_definition),
        );
    }
}

#[test]
fn lstm_layers_match_burn_in_all_settings() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    let config = || nn::LstmConfig::new(5, 7, true);
    for config in [
        config(),
        config().with_batch_first(false),
        config().with_reverse(true),
        config().with_clip(Some(0.1)),
        config().with_input_forget(true),
        config().with_hidden_activation(burn::nn::activation::ActivationConfig::Relu),
        nn::LstmConfig::new(5, 7, false),
    ] {
        let ours = config.init(&device);
        let burns = burn::nn::Lstm::from(ours.clone());
        let x = || Tensor::<3>::from_data(numbers(&[3, 4, 5], 1), &device);
        let (output, state) = ours.forward(x(), None);
        let (expected, of_burn) = burns.forward(x(), None);
        let off = [
            (output - expected).abs().max(),
            (state.hidden - of_burn.hidden).abs().max(),
            (state.cell - of_burn.cell).abs().max(),
        ];
        for off in off {
            assert!(off.into_scalar::<f32>() < 1e-6);
        }
    }
}

/// Returns the hidden states of an LSTM, followed by its last hidden state and cell state. The leaves are the input,
/// the initial hidden and cell states, and each gate's weights and optional biases.
pub(crate) fn states_of_lstm(leaves: &Leaves, batch_first: bool, run: RunsLstm) -> Tensor<3> {
    let [batch, steps, inputs] = leaves.at::<3>(0).dims();
    let [_, width] = leaves.at::<2>(1).dims();
    let has_bias = leaves.0.len() > 11;
    let device = leaves.at::<3>(0).device();
    let config = burn::nn::LstmConfig::new(inputs, width, has_bias).with_batch_first(batch_first);
    let mut layer = config.init(&device);
    let mut next = 3;
    let gates = [
        Some(&mut layer.input_gate),
        layer.forget_gate.as_mut(),
        Some(&mut layer.output_gate),
        Some(&mut layer.cell_gate),
    ];
    for gate in gates.into_iter().flatten() {
        for linear in [&mut gate.input_transform, &mut gate.hidden_transform] {
            linear.weight = Param::from_tensor(leaves.at(next));
            next += 1;
            if has_bias {
                linear.bias = Some(Param::from_tensor(leaves.at(next)));
                next += 1;
            }
        }
    }
    let order = |x: Tensor<3>| match batch_first {
        true => x,
        false => x.swap_dims(0, 1),
    };
    let state = burn::nn::LstmState::new(leaves.at(2), leaves.at(1));
    let (output, last) = run(layer, order(leaves.at(0)), Some(state));
    let output = order(output);
    assert_eq!(output.dims(), [batch, steps, width]);
    Tensor::cat(
        vec![
            output,
            last.hidden.unsqueeze_dim(1),
            last.cell.unsqueeze_dim(1),
        ],
        1,
    )
}

/// Computes an LSTM step by step, as Burn's layer does, but in the type of its input; Burn's layer uses the default
/// float type of the device.
fn steps_by_definition(
    layer: burn::nn::Lstm,
    x: Tensor<3>,
    state: Option<burn::nn::LstmState<2>>,
) -> (Tensor<3>, burn::nn::LstmState<2>) {
    let time = usize::from(layer.batch_first);
    let (mut cell, mut hidden) = state.unwrap().unpack();
    let mut states = Vec::new();
    for step in 0..x.dims()[time] {
        let x = x.clone().narrow(time, step, 1).squeeze_dim::<2>(time);
        let [input, forget, output] = [
            &layer.input_gate,
            layer.forget_gate.as_ref().unwrap(),
            &layer.output_gate,
        ]
        .map(|gate| activation::sigmoid(gate.gate_product(x.clone(), hidden.clone())));
        let value = layer.cell_gate.gate_product(x, hidden).tanh();
        cell = forget * cell + input * value;
        hidden = output * cell.clone().tanh();
        states.push(hidden.clone());
    }
    (
        Tensor::stack(states, time),
        burn::nn::LstmState::new(cell, hidden),
    )
}

type RunsLstm = fn(
    burn::nn::Lstm,
    Tensor<3>,
    Option<burn::nn::LstmState<2>>,
) -> (Tensor<3>, burn::nn::LstmState<2>);

pub(crate) fn leaves_of_lstm(
    [batch, steps, inputs, width]: [usize; 4],
    has_bias: bool,
    seed: u64,
) -> Vec<TensorData> {
    let mut shapes = vec![
        vec![batch, steps, inputs],
        vec![batch, width],
        vec![batch, width],
    ];
    for _ in 0..4 {
        for rows in [inputs, width] {
            shapes.push(vec![rows, width]);
            if has_bias {
                shapes.push(vec![width]);
            }
        }
    }
    // Scaled like a newly initialized layer. With larger weights, each step would amplify the previous rounding errors.
    let scale = (width as f32).sqrt().recip();
    let leaves = shapes.iter().zip(seed..);
    leaves
        .map(|(shape, seed)| {
            let numbers = numbers(shape, seed);
            let scaled = numbers.iter::<f32>().map(|number| number * scale);
            TensorData::new(scaled.collect(), shape.clone())
        })
        .collect()
}
