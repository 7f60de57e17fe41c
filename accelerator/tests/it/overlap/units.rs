//! Overlap of models whose blocks are units.

use accelerator::OverlapState;
use accelerator::nn::Units;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::harness::{Place, Setting, same_bits, trained};
use crate::common::{Encoder, devices};

fn encoder(device: &Device) -> Encoder {
    Encoder::new(3, 0.0, device)
}

/// Has 32 rows, of which Burn's `linear` makes one matrix, and a view of each weight.
fn loss(model: &Encoder, place: &Place) -> Tensor<1> {
    model.loss(place.input([4, 8, 16]))
}

#[test]
fn units_hand_over_their_gradients_early_where_parameters_are_seen_through_views() {
    for kind in devices() {
        let setting = |units| Setting {
            accumulation: 2,
            units,
            ..Setting::new(kind)
        };
        let plain = trained(setting(Units::Plain), encoder, loss);
        for report in same_bits(setting(Units::Plain), encoder, loss) {
            assert!(report.early * 4 < report.buckets, "{report:?}");
            assert_eq!(report.early + report.late, report.buckets);
        }
        for units in [Units::Keep, Units::Recompute] {
            let reports = same_bits(setting(units), encoder, loss);
            for report in &reports {
                assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
                assert!(report.late * 4 < report.buckets, "{report:?}");
            }
            assert!(
                reports
                    .iter()
                    .all(|report| report.early * 4 > report.buckets * 3),
                "{reports:?}"
            );
            assert_eq!(trained(setting(units), encoder, loss), plain);
        }
    }
}

#[test]
fn units_have_the_bits_of_plain_blocks_at_any_number_of_rows() {
    for kind in devices() {
        for shape in [[1, 31], [8, 8], [8, 64]] {
            let [batch, length] = shape;
            let loss =
                move |model: &Encoder, place: &Place| model.loss(place.input([batch, length, 16]));
            let outcome = |units| {
                let setting = Setting {
                    units,
                    ..Setting::new(kind)
                };
                same_bits(setting, encoder, loss);
                trained(setting, encoder, loss)
            };
            let plain = outcome(Units::Plain);
            for units in [Units::Keep, Units::Recompute] {
                assert_eq!(outcome(units), plain, "{kind}, {shape:?}, {units}");
            }
        }
    }
}

/// The same encoder of layers whose every operation has its weights as parents.
#[cfg(feature = "ops")]
#[test]
fn layers_of_ops_are_ready_early_without_units() {
    use accelerator::ops::nn::{
        TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
    };

    for kind in devices() {
        for length in [8, 31] {
            let setting = Setting {
                accumulation: 2,
                ..Setting::new(kind)
            };
            let build = |device: &Device| -> TransformerEncoder {
                let config = TransformerEncoderConfig::new(16, 32, 2, 3);
                config.with_dropout(0.0).init(device)
            };
            let loss = move |model: &TransformerEncoder, place: &Place| {
                let input = TransformerEncoderInput::new(place.input([4, length, 16]));
                model.forward(input).powi_scalar(2).mean()
            };
            for report in same_bits(setting, build, loss) {
                assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
                assert!(report.early * 4 > report.buckets * 3, "{kind}, {report:?}");
            }
        }
    }
}

#[test]
fn a_model_without_early_gradients_is_told_how_to_get_them() {
    for kind in devices() {
        let setting = Setting::new(kind);
        let build = |device: &Device| LinearConfig::new(16, 16).init(device);
        let loss = |model: &Linear, place: &Place| {
            let x: Tensor<3> = place.input([4, 8, 16]);
            model.forward(x).powi_scalar(2).mean()
        };
        for report in same_bits(setting, build, loss) {
            assert_eq!(report.state, OverlapState::NothingEarly);
            assert_eq!((report.early_total, report.late), (0, report.buckets));
            assert!(report.state.to_string().contains("Units::Keep"));
        }
    }
}
