use std::sync::Barrier;

use burn::module::ParamId;
use burn::tensor::{Device, Tensor};

use super::*;
use crate::core::device::BackendKind;
use crate::model::{Float, TiedParameters, Trainable};
use crate::reduce::bucket_set::BucketState;
use crate::reduce::bucket_storage::BucketStorage;
use crate::reduce::device_reduce::GradientReduction;
use crate::reduce::model_state::ModelSettings;
use crate::reduce::on_ranks;
use crate::reduce::overlap::OverlapSwitch;
use crate::timeline::Recording;

/// Creates the state of a model whose parameters have these ids, and 1000 elements each.
fn model_state(ids: impl IntoIterator<Item = u64>) -> Arc<ModelState> {
    let parameter = |id: u64| Trainable {
        id: ParamId::from(id),
        path: format!("{id}"),
        shape: vec![1000],
        float: Float::F32,
        piece: None,
    };
    Arc::new(ModelState::new(ModelSettings {
        bucket_size: 1024,
        device_reducer: Arc::new(DeviceReducer::new(
            GradientReduction::Auto,
            BackendKind::Flex,
            &Device::default(),
            Compression::None,
        )),
        hook: None,
        ids: Vec::new(),
        leaf_before_prepare: None,
        on_non_finite_loss: OnNonFiniteLoss::Warn,
        overlap: OverlapSwitch::On,
        parameters: ids.into_iter().map(parameter).collect(),
        scaler: None,
        steps: 0,
        tied: TiedParameters::default(),
    }))
}

/// Creates the reducer of a window whose only micro-step has the weight 1.
fn reducer(model_state: &ModelState, group: &ProcessGroup) -> Reducer {
    let reducer = Reducer::new(
        model_state,
        group,
        Window::default(),
        1.0,
        Compression::None,
        Repair::Possible,
        &Timeline::new(group, Recording::Nothing).unwrap(),
    );
    reducer.unwrap()
}

fn gradient(value: f32) -> Tensor<1> {
    Tensor::full([1000], value, &Device::default())
}

fn loss(value: f64) -> MicroLoss {
    MicroLoss::Read(value)
}

/// Registers gradients of both parameters.
fn gradients(first: Tensor<1>, second: Tensor<1>) -> GradientsParams {
    let mut gradients = GradientsParams::new();
    gradients.register(ParamId::from(1), first);
    gradients.register(ParamId::from(2), second);
    gradients
}

#[test]
fn a_bucket_is_reduced_before_backward_ends() {
    let in_backward = Barrier::new(2);
    let results = on_ranks(2, |group| {
        let model_state = model_state([1, 2]);
        let mut reducer = reducer(&model_state, &group);
        // The second parameter is in the first bucket.
        let (first, second) = (gradient(2.0), gradient(1.0 + group.rank() as f32));
        let seen = second.clone().into_dispatch();
        reducer.complete(0, &mut core::iter::once(Some(seen)));
        // Both ranks are still in backward: neither has finished, and neither will before the sum is there.
        let BucketState::Sent(pending) = reducer.bucket_set.buckets[0].state.take() else {
            panic!("{reducer:?}");
        };
        let buffer = pending.wait().unwrap();
        assert_eq!(buffer.as_slice::<f32>().unwrap(), [3.0; 1000]);
        in_backward.wait();
        reducer.bucket_set.buckets[0].state = BucketState::Summed(BucketStorage::Host(buffer));

        let gradients = gradients(first, second);
        let reduced = reducer
            .finish(&model_state, gradients, loss(0.5), None)
            .unwrap();
        assert_eq!((reduced.early, reduced.repaired), (1, 0));
        (
            reduced.sums.total,
            reduced.sums.loss.value(),
            reduced.sums.with_gradients().count(),
        )
    });
    assert_eq!(results, vec![(2.0, 1.0, 2); 2]);
}

#[test]
fn a_bucket_waits_for_those_before_it() {
    on_ranks(2, |group| {
        let model_state = model_state([1, 2]);
        let mut reducer = reducer(&model_state, &group);
        let (first, second) = (gradient(1.0), gradient(2.0));
        let (seen_first, seen_second) = (
            first.clone().into_dispatch(),
            second.clone().into_dispatch(),
        );
        // Rank 1 has them in the other order, but sends in the same.
        if group.rank() == 1 {
            reducer.complete(1, &mut core::iter::once(Some(seen_first)));
            assert_eq!(reducer.early, 0);
            reducer.complete(0, &mut core::iter::once(Some(seen_second)));
        } else {
            reducer.complete(0, &mut core::iter::once(Some(seen_second)));
            assert_eq!(reducer.early, 1);
            reducer.complete(1, &mut core::iter::once(Some(seen_first)));
        }
        assert_eq!(reducer.early, 2);
        let gradients = gradients(first, second);
        let reduced = reducer
            .finish(&model_state, gradients, loss(0.0), None)
            .unwrap();
        let sums = |parameter| match reduced.sums.place(parameter) {
            Some((BucketStorage::Host(buffer), _)) => buffer.as_slice::<f32>().unwrap(),
            other => panic!("{other:?}"),
        };
        assert_eq!(sums(0), [2.0; 1000]);
        assert_eq!(sums(1), [4.0; 1000]);
    });
}

#[test]
fn a_rank_that_stops_in_the_middle_fails_all_by_name() {
    let over = Barrier::new(2);
    let errors = on_ranks(2, |group| {
        let model_state = model_state([1, 2]);
        let mut reducer = reducer(&model_state, &group);
        let (first, second) = (gradient(1.0), gradient(2.0));
        let seen = second.clone().into_dispatch();
        reducer.complete(0, &mut core::iter::once(Some(seen)));
        let mut gradients = gradients(first, second);
        if group.rank() == 0 {
            gradients.register(ParamId::from(3), gradient(3.0));
        }
        let error = reducer
            .finish(&model_state, gradients, loss(0.0), None)
            .err()
            .unwrap();
        // Both ranks have their errors, so dropping a group cannot be the cause.
        over.wait();
        assert!(group.barrier().is_err());
        error
    });
    assert!(errors[0].is_misuse(), "{:?}", errors[0]);
    assert!(errors[1].is_peer_lost(), "{:?}", errors[1]);
    let text = errors[1].to_string();
    assert!(
        text.contains("rank 0")
            && text.contains("1 gradients are of parameters that this model does not train"),
        "{text}"
    );
}

#[test]
fn a_window_that_the_group_refuses_owes_nothing() {
    on_ranks(2, |group| {
        let model_state = model_state([1, 2]);
        let ready = reducer(&model_state, &group);
        let guard = group.forbid("ranks are not together");
        let timeline = Timeline::new(&group, Recording::Nothing).unwrap();
        let (window, half) = (Window::default(), Compression::F16);
        let weighing = Reducer::new(
            &model_state,
            &group,
            window,
            1.0,
            half,
            Repair::Possible,
            &timeline,
        );
        assert!(weighing.err().unwrap().is_misuse());
        let gradients = gradients(gradient(1.0), gradient(2.0));
        let error = ready
            .finish(&model_state, gradients, loss(0.0), None)
            .err()
            .unwrap();
        assert!(error.is_misuse(), "{error:?}");
        drop(guard);
        group.barrier().unwrap();
    });
}

#[test]
fn models_are_told_apart_by_more_than_a_few_bits() {
    // The ids have 16 bits of their hashes in common, the upper or the lower ones.
    let (upper, lower) = (|hash: u64| hash >> 48, |hash: u64| hash & 0xFFFF);
    for bits in [upper, lower] {
        let of = |id: u64| bits(accelerator_plan::mix(&[id]));
        let twin = (2..).find(|&id| of(id) == of(1)).unwrap();
        let errors = on_ranks(2, |group| {
            let id = [1, twin][group.rank()];
            let model_state = model_state([id]);
            let mut gradients = GradientsParams::new();
            gradients.register(ParamId::from(id), gradient(1.0));
            reducer(&model_state, &group).finish(&model_state, gradients, loss(0.0), None)
        });
        for error in errors {
            let error = error.err().unwrap();
            assert!(error.is_misuse(), "{error:?}");
            assert!(error.to_string().contains("different models"), "{error}");
        }
    }
}
