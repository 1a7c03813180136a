// efa_endpoint_test.cpp by posters that wait for no turn.
#define EP_TEST_EFA_WAY ep::by_marks
#include "efa_endpoint_test.cpp"
