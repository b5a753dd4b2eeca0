from spindle.metrics import combine_metrics


def test_each_reduction_means_what_the_sdk_means_by_it():
    parts = [
        ({"loss:sum": 1.0, "r:mean": 1.0, "a:min": 2.0, "b:max": 2.0, "s:slack": 1.0, "u:unique": 7.0, "only:sum": 1.0}, 1),
        ({"loss:sum": 2.5, "r:mean": 5.0, "a:min": 1.0, "b:max": 3.0, "s:slack": 5.0, "u:unique": 8.0}, 3),
    ]
    assert combine_metrics(parts) == {"loss:sum": 3.5, "r:mean": 4.0, "a:min": 1.0, "b:max": 3.0, "s:slack": 1.0, "u:unique": 7.0}
    assert combine_metrics(parts[:1]) == parts[0][0]
