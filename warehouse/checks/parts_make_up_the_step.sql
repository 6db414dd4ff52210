-- If the parts of a step time (compute, exposed communication, input) are known, none is negative
-- and their sum is the step time. Must return no row.
select
    format(
        '{} {} rank {}: step_s is {}, but compute_s is {}, communication_s is {}, exposed_communication_s is {} and'
            ' input_s is {}',
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
