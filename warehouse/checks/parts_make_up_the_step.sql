-- A step is the sum of its parts, if they are known; none is negative. Must return no row.
select
    format(
        '{} {} rank {}: {} s per step, but {} s of computing, {} s of communication, of which {} s are not hidden, and {} s'
            ' of waiting for input',
        workload, goal, rank, step_s, coalesce(compute_s::varchar, 'unknown'), coalesce(communication_s::varchar, 'unknown'),
        coalesce(exposed_communication_s::varchar, 'unknown'), coalesce(input_s::varchar, 'unknown')
    ) as problem
from published
where coalesce(compute_s, communication_s, exposed_communication_s, input_s) is not null
    and not coalesce(
        abs(step_s - (compute_s + exposed_communication_s + input_s)) <= 1e-6 * step_s
            and communication_s >= exposed_communication_s - 1e-6 * step_s
            and compute_s >= 0 and exposed_communication_s >= 0 and input_s >= 0,
        false
    );
