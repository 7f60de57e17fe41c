//! Layers, in all their settings.

use accelerator_ops::nn::{self, MhaInput};
use burn::module::{Module, Param};
use burn::nn::{PaddingConfig1d, PaddingConfig2d};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};

use super::{drawing, mask, numbers};

#[test]
fn sequence_layers_and_losses_match_burn_in_all_settings() {
    let _drawing = drawing();
    let device = Device::flex();
    let close = |ours: TensorData, burns: TensorData| {
        assert_eq!(ours.shape(), burns.shape());
        for (ours, burns) in ours.iter::<f32>().zip(burns.iter::<f32>()) {
            assert!((ours - burns).abs() < 2e-6, "{ours}, {burns}");
        }
    };
    let x = || Tensor::<3>::from_data(numbers(&[2, 4, 11], 1), &device);
    for (padding, kernel, stride) in [
        (PaddingConfig1d::Same, 4, 1),
        (PaddingConfig1d::Same, 3, 2),
        (PaddingConfig1d::Explicit(2, 0), 3, 1),
        (PaddingConfig1d::Valid, 2, 3),
    ] {
        let config = nn::Conv1dConfig::new(4, 6, kernel).with_padding(padding);
        let ours = config.with_stride(stride).with_groups(2).init(&device);
        let burns = burn::nn::conv::Conv1d::from(ours.clone());
        close(
            ours.forward(x()).into_data(),
            burns.forward(x()).into_data(),
        );
    }
    for (padding, kernel, stride) in [
        (PaddingConfig1d::Same, 4, 1),
        (PaddingConfig1d::Explicit(1, 0), 3, 2),
        (PaddingConfig1d::Valid, 2, 3),
    ] {
        let config = nn::MaxPool1dConfig::new(kernel).with_stride(stride);
        for ceil_mode in [false, true] {
            let ours = config.clone().with_padding(padding.clone());
            let ours = ours.with_ceil_mode(ceil_mode).init();
            let burns = burn::nn::pool::MaxPool1d::from(ours.clone());
            close(
                ours.forward(x()).into_data(),
                burns.forward(x()).into_data(),
            );
            let ours = nn::AvgPool1dConfig::new(kernel).with_stride(stride);
            let ours = ours.with_padding(padding.clone()).with_ceil_mode(ceil_mode);
            let ours = ours.with_count_include_pad(!ceil_mode).init();
            let burns = burn::nn::pool::AvgPool1d::from(ours.clone());
            close(
                ours.forward(x()).into_data(),
                burns.forward(x()).into_data(),
            );
        }
    }
    let images = || Tensor::<4>::from_data(numbers(&[2, 3, 9, 8], 1), &device);
    for (padding, counts_padding) in [
        (PaddingConfig2d::Same, true),
        (PaddingConfig2d::Explicit(1, 0, 1, 1), false),
        (PaddingConfig2d::Valid, true),
    ] {
        let ours = nn::AvgPool2dConfig::new([3, 2]).with_strides([2, 1]);
        let ours = ours
            .with_padding(padding)
            .with_count_include_pad(counts_padding)
            .init();
        let burns = burn::nn::pool::AvgPool2d::from(ours.clone());
        close(
            ours.forward(images()).into_data(),
            burns.forward(images()).into_data(),
        );
    }
    for output in [[1, 1], [3, 4], [2, 3]] {
        let ours = nn::AdaptiveAvgPool2dConfig::new(output).init();
        let burns = burn::nn::pool::AdaptiveAvgPool2d::from(ours.clone());
        close(
            ours.forward(images()).into_data(),
            burns.forward(images()).into_data(),
        );
    }
    let ours = nn::EmbeddingConfig::new(5, 3).init(&device);
    let burns = burn::nn::Embedding::from(ours.clone());
    let words = || Tensor::<2, Int>::from_data([[4, 0], [2, 4]], &device);
    close(
        ours.forward(words()).into_data(),
        burns.forward(words()).into_data(),
    );
    let logits = || activation::softmax(Tensor::<2>::from_data(numbers(&[6, 4], 2), &device), 1);
    let targets = || Tensor::<1, Int>::from_data([0, 3, 1, 2, 2, 0], &device);
    let config = nn::CrossEntropyLossConfig::new;
    for config in [
        config(),
        config().with_pad_tokens(Some(vec![2])),
        config().with_weights(Some(vec![0.5, 1.0, 2.0, 3.0])),
        config().with_smoothing(Some(0.1)),
        config().with_logits(false),
    ] {
        let ours = config.init(&device);
        let burns = burn::nn::loss::CrossEntropyLoss::from(ours.clone());
        let (ours, burns) = (
            ours.forward(logits(), targets()),
            burns.forward(logits(), targets()),
        );
        close(ours.into_data(), burns.into_data());
    }
    let config = nn::MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
    let config = config.with_query_bias(false).with_key_bias(false);
    let layer = config
        .with_value_bias(false)
        .with_output_bias(false)
        .init(&device);
    let biases = [&layer.query, &layer.key, &layer.value, &layer.output];
    assert!(biases.iter().all(|linear| linear.bias.is_none()));
    let x = || MhaInput::self_attn(Tensor::from_data(numbers(&[2, 5, 8], 3), &device));
    close(
        layer.context(x()).into_data(),
        layer.forward(x()).context.into_data(),
    );
}

/// Runs a layer on a fixed input, and returns its output and the gradients of all its parameters.
fn of_layer<M: Module>(layer: &M, run: impl Fn(&M, Tensor<3>) -> Tensor<3>) -> Vec<Vec<f32>> {
    struct Reader<'a>(&'a burn::tensor::Gradients, Vec<Vec<f32>>);
    impl burn::module::ModuleVisitor for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param.val().grad(self.0).unwrap();
            self.1.push(gradient.into_data().try_to_vec().unwrap());
        }
    }
    let device = Device::flex().autodiff();
    let x = Tensor::<3>::from_data(numbers(&[3, 16, 24], 5), &device);
    let y = run(layer, x);
    let weights = Tensor::from_data(numbers(&y.dims(), 6), &device);
    let gradients = (y.clone() * weights).sum().backward();
    let mut reader = Reader(&gradients, vec![y.into_data().try_to_vec().unwrap()]);
    layer.visit(&mut reader);
    reader.1
}

#[test]
fn transformer_layers_match_burn() {
    let _drawing = drawing();
    let device = Device::flex().autodiff();
    let padding = || mask([3, 16], 8);
    let pairs = || mask([3, 16, 16], 9);
    for norm_first in [false, true] {
        let config = burn::nn::transformer::TransformerEncoderConfig::new(24, 40, 4, 2)
            .with_norm_first(norm_first)
            .with_dropout(0.0);
        let burns = config.init(&device);
        let ours = nn::TransformerEncoder::from(burns.clone());
        let ours = of_layer(&ours, |layer, x| {
            let input = nn::TransformerEncoderInput::new(x);
            layer.forward(input.mask_pad(padding()).mask_attn(pairs()))
        });
        let burns = of_layer(&burns, |layer, x| {
            let input = burn::nn::transformer::TransformerEncoderInput::new(x);
            layer.forward(input.mask_pad(padding()).mask_attn(pairs()))
        });
        assert_eq!(ours.len(), burns.len());
        for (ours, burns) in ours.iter().zip(&burns) {
            let scale = burns
                .iter()
                .fold(0.0_f32, |scale, value| scale.max(value.abs()));
            for (ours, burns) in ours.iter().zip(burns) {
                // The gradient of the key bias is zero up to rounding.
                assert!(
                    (ours - burns).abs() <= 1e-5 * scale.max(0.1),
                    "{ours}, {burns}"
                );
            }
        }
    }
}

#[test]
fn running_statistics_match_burns_batch_norm() {
    let device = Device::flex().autodiff();
    let config = nn::BatchNormConfig::new(3).with_momentum(0.3);
    let ours = config.init(&device);
    let burns: burn::nn::BatchNorm = config.init(&device).into();
    for seed in 0..3 {
        let x = || Tensor::<4>::from_data(numbers(&[4, 3, 5, 6], seed), &device);
        let (ours, burns) = (ours.forward(x()), burns.forward(x()));
        assert!((ours - burns).abs().max().into_scalar::<f32>() < 2e-6);
    }
    for (ours, burns) in [
        (&ours.running_mean, &burns.running_mean),
        (&ours.running_var, &burns.running_var),
    ] {
        let (ours, burns) = (ours.value_sync(), burns.value_sync());
        let first = burns.clone().into_data().iter::<f32>().next().unwrap();
        assert!(
            first != 0.0 && first != 1.0,
            "the running statistics were updated"
        );
        assert!((ours - burns).abs().max().into_scalar::<f32>() < 2e-6);
    }
    let x = || Tensor::<4>::from_data(numbers(&[4, 3, 5, 6], 9), &Device::flex());
    let (ours, burns) = (ours.valid(), burns.valid());
    let off = (ours.forward(x()) - burns.forward(x())).abs().max();
    assert!(off.into_scalar::<f32>() < 2e-6);
}

#[test]
fn records_and_epsilons_match_burn() {
    let _drawing = drawing();
    let device = Device::flex();
    let config = nn::LayerNormConfig::new(4).with_epsilon(0.5);
    let (ours, burns) = (config.init(&device), (*config).init(&device));
    let x = || Tensor::<2>::from_data(numbers(&[3, 4], 1), &device);
    let (ours, burns) = (
        ours.forward(x()).into_data(),
        burns.forward(x()).into_data(),
    );
    for (ours, burns) in ours.iter::<f32>().zip(burns.iter::<f32>()) {
        assert!((ours - burns).abs() < 1e-6, "{ours}, {burns}");
    }
    let burns = burn::nn::LinearConfig::new(3, 2).init(&device);
    let ours = nn::LinearConfig::new(3, 2).init(&device);
    let ours = ours.load_record(burns.clone().into_record());
    assert_eq!(
        ours.weight.val().into_data(),
        burns.weight.val().into_data()
    );
    assert_eq!(format!("{ours}"), format!("{burns}"));
    let back = burn::nn::LinearConfig::new(3, 2).init(&device);
    let back = back.load_record(ours.into_record());
    assert_eq!(
        back.weight.val().into_data(),
        burns.weight.val().into_data()
    );
}
