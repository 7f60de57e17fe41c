//! Overlap on all kinds of graphs.

use accelerator::OverlapState;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::harness::{Place, Setting, assert_on, same_bits};
use super::models::{Cnn, Mlp};
use crate::common::devices;

#[test]
fn a_network_has_the_same_bits_on_any_number_of_ranks() {
    for kind in devices() {
        for ranks in [2, 3] {
            let setting = Setting {
                ranks,
                ..Setting::new(kind)
            };
            assert_on(&same_bits(setting, Mlp::four, Mlp::loss));
        }
    }
}

#[test]
fn a_network_with_batch_norm() {
    for kind in devices() {
        assert_on(&same_bits(Setting::new(kind), Cnn::new, Cnn::loss));
    }
}

#[derive(Debug, Module)]
struct Tied {
    embedding: Embedding,
    layers: Mlp,
}

#[test]
fn a_weight_that_is_used_at_both_ends() {
    for kind in devices() {
        let build = |device: &Device| Tied {
            embedding: EmbeddingConfig::new(10, Mlp::WIDTH).init(device),
            layers: Mlp::four(device),
        };
        let loss = |model: &Tied, place: &Place| {
            let words: Vec<i64> = (0..6).map(|i| (i * 3 + place.step as i64) % 10).collect();
            let words = TensorData::new(words, [2, 3]);
            let words = Tensor::<2, Int>::from_data(words, &place.device.clone().inner());
            let x = model.embedding.forward(words).flatten::<2>(0, 1);
            let x = model.layers.forward(x);
            let scores = x.matmul(model.embedding.weight.val().transpose());
            (scores.clone() * scores).mean()
        };
        assert_on(&same_bits(Setting::new(kind), build, loss));
    }
}

#[test]
fn frozen_parameters() {
    for kind in devices() {
        let build = |device: &Device| {
            let mut model = Mlp::four(device);
            let layer = model.layers.remove(2).no_grad();
            model.layers.insert(2, layer);
            model
        };
        assert_on(&same_bits(Setting::new(kind), build, Mlp::loss));
    }
}

#[test]
fn parameters_that_no_rank_uses_or_only_some_do() {
    for kind in devices() {
        let setting = Setting::new(kind);
        // No rank uses the last layer, and only rank 1 uses the one before it.
        let build = |device: &Device| Mlp::new(6, device);
        let loss = |model: &Mlp, place: &Place| {
            let used = if place.rank == 1 { 5 } else { 4 };
            let layers = Mlp {
                layers: model.layers[..used].to_vec(),
            };
            layers.loss(place)
        };
        for report in same_bits(setting, build, loss) {
            assert_eq!(report.state, OverlapState::On);
            assert_eq!(report.repairs, 0);
        }
        // Rank 1 does not use a layer in the middle.
        let loss = |model: &Mlp, place: &Place| {
            let mut layers = model.clone();
            if place.rank == 1 {
                layers.layers.remove(2);
            }
            layers.loss(place)
        };
        for report in same_bits(setting, Mlp::four, loss) {
            assert_eq!(report.repairs, 0);
        }
    }
}

#[test]
fn a_graph_that_is_another_one_in_each_step_and_on_each_rank() {
    for kind in devices() {
        let loss = |model: &Mlp, place: &Place| {
            let mut layers = model.clone();
            layers.layers.rotate_left(place.step % 3);
            layers.layers.truncate(2 + (place.step + place.rank) % 3);
            layers.loss(place)
        };
        let setting = Setting {
            steps: 12,
            ..Setting::new(kind)
        };
        same_bits(setting, Mlp::four, loss);
    }
}

#[test]
fn gradient_checkpointing() {
    for kind in devices() {
        let build = |device: &Device| Mlp::four(&device.clone().gradient_checkpointing());
        assert_on(&same_bits(Setting::new(kind), build, Mlp::loss));
    }
}

#[test]
fn two_losses_added() {
    for kind in devices() {
        let loss = |model: &Mlp, place: &Place| {
            let second = Place {
                device: place.device.clone(),
                rank: place.rank,
                step: place.step + 100,
            };
            model.loss(place) + model.loss(&second) * 0.5
        };
        assert_on(&same_bits(Setting::new(kind), Mlp::four, loss));
    }
}
